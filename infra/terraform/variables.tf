variable "region" {
  description = "Region of the bucket: that of the workers, since reads from another region have to be paid for."
  type        = string
}

variable "bucket" {
  description = "Name of the bucket, globally unique."
  type        = string
}

variable "prefix" {
  description = "Folder of the store in the bucket: the store is s3://BUCKET/PREFIX."
  type        = string
  default     = "bookwheel"

  validation {
    condition     = can(regex("^[a-z0-9][a-z0-9/_-]*[a-z0-9]$", var.prefix))
    error_message = "The prefix has no slash at either end."
  }
}

variable "undelete_days" {
  description = "Days for which deleted or overwritten files can be restored. Their storage has to be paid for."
  type        = number
  default     = 30

  validation {
    condition     = var.undelete_days >= 1
    error_message = "At least one day."
  }
}

variable "oidc_provider" {
  description = "Issuer of an EKS cluster's tokens without https://, for roles that its pods assume; null: no roles."
  type        = string
  default     = null
}

variable "namespace" {
  description = "Kubernetes namespace of bookwheel."
  type        = string
  default     = "bookwheel"
}
