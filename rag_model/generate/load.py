"""Opening a generator: a Hugging Face folder, a hub name, or a folder with one GGUF file.

The family is read from the config; which form it is given follows from the family and the tokenizer's chat template.
Only safetensors and GGUF are read: pickled weights can run code.
"""

from pathlib import Path

import torch
import transformers

from rag_model.encoders.files import CONFIG, read_object
from rag_model.encoders.resolve import resolve_folder
from rag_model.encoders.weights import stored_tensors
from rag_model.errors import InputError
from rag_model.generate.generator import Generator
from rag_model.generate.inputs import Form, PaperForm
from rag_model.generate.seq2seq import Seq2SeqGenerator

_UNBOUNDED = 100_000  # tokens; tokenizers write 1e30 for "no limit"


def load_generator(
    name: str | Path, form: Form | None = None, device: str | None = None, dtype: str | None = None
) -> Generator:
    """Load the generator in folder `name`, or of that hub name; ready to answer, not to learn (`.module.train()`).

    `form`: by default the paper's for an encoder-decoder. `device` (`cpu`, `cuda:1`): by default a GPU, else the CPU.
    `dtype`: by default float32, in which a generator learns.

    Raises:
        InputError: it is not to be found, a file is missing, pickled or corrupt, or it is no generator.
        UsageError: this machine has no such device, or torch no such dtype.
    """
    folder = resolve_folder(name)
    config = read_object(folder / CONFIG)
    stored_tensors(folder)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        module = transformers.AutoModelForSeq2SeqLM.from_pretrained(
            str(folder), local_files_only=True, use_safetensors=True, dtype=getattr(torch, dtype or "float32")
        )
    except (OSError, ValueError, RuntimeError, KeyError) as broken:
        raise InputError(f"generator {folder} can not be loaded ({broken}): give a generator") from broken
    module.to(device or ("cuda" if torch.cuda.is_available() else "cpu")).eval()
    special = tokenizer("")["input_ids"]
    first = special[0] if len(special) > 1 else None
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    longest = min(int(limit) for limit in (config.get("max_position_embeddings"), _UNBOUNDED) if limit)
    return Seq2SeqGenerator(
        module,
        tokenizer,
        form or PaperForm(),
        module.config.decoder_start_token_id,
        first,
        tokenizer.eos_token_id,
        pad,
        longest,
    )
