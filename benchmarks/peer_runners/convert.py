"""A GGUF file as a directory of float32 safetensors, for servers that read only these.

    python convert.py MODEL.gguf DIRECTORY

transformers dequantises the file, but refuses to save a model that was quantised: so its tensors
go into a fresh model of the same shape.
"""

import os
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    gguf, target = Path(sys.argv[1]), Path(sys.argv[2])
    read = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    quantised = AutoModelForCausalLM.from_pretrained(**read, dtype=torch.float32)
    config = AutoConfig.from_pretrained(**read)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantised.state_dict())
    model.tie_weights()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        model.save_pretrained(scratch, max_shard_size="100GB")
        AutoTokenizer.from_pretrained(**read).save_pretrained(scratch)
        os.chmod(scratch, 0o755)
        os.rename(scratch, target)  # last, so that half a directory is never found
        os.mkdir(scratch)  # for the context manager to remove


if __name__ == "__main__":
    main()
