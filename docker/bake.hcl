# docker buildx bake -f docker/bake.hcl [cpu gpu worker serve dataflow]
# TAG is bookwheel's version: `doctor` compares it with the launcher's. REGISTRY ends with a slash.
variable "TAG" {
  default = "0.1.0"
}

variable "REGISTRY" {
  default = ""
}

# torch's CUDA; the driver of the host must know it
variable "CUDA" {
  default = "cu128"
}

# That of the extra `gpu`, for the same CUDA 12: graphs are built alike in the image and beside it.
# faiss-gpu-cuvs, which builds graphs on the GPU, needs CUDA 13.2 or later, and so another torch.
variable "FAISS_GPU" {
  default = "faiss-gpu>=1.15.1,<1.16"
}

group "default" {
  targets = ["cpu", "gpu", "worker", "serve"]
}

target "cpu" {
  dockerfile = "docker/Dockerfile"
  target     = "flows"
  tags       = ["${REGISTRY}bookwheel-cpu:${TAG}"]
}

target "gpu" {
  dockerfile = "docker/Dockerfile"
  target     = "flows"
  tags       = ["${REGISTRY}bookwheel-gpu:${TAG}"]
  args = {
    TORCH     = CUDA
    FAISS_GPU = FAISS_GPU
  }
}

target "worker" {
  dockerfile = "docker/Dockerfile"
  target     = "worker"
  tags       = ["${REGISTRY}bookwheel-worker:${TAG}"]
}

target "serve" {
  dockerfile = "docker/Dockerfile"
  target     = "serve"
  tags       = ["${REGISTRY}bookwheel-serve:${TAG}"]
}

# for Dataflow alone, so not among the default
target "dataflow" {
  dockerfile = "docker/Dockerfile"
  target     = "dataflow"
  tags       = ["${REGISTRY}bookwheel-dataflow:${TAG}"]
  args = {
    TORCH     = CUDA
    FAISS_GPU = FAISS_GPU
  }
}
