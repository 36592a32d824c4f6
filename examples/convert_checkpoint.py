"""Convert a GPT-OSS checkpoint from Python: Hugging Face -> Megatron -> Hugging Face.

    python examples/convert_checkpoint.py [FOLDER]

makes a tiny model with transformers, converts it both ways and compares every bit. It needs neither
a GPU nor a process group, because the converters stream tensors from file to file. ``gptoss
convert`` does the same.
"""

import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import GptOssConfig, GptOssForCausalLM

from converters.torch_dist import export_checkpoint, import_checkpoint
from converters.verify import verify


def save_tiny_model(folder: Path) -> None:
    """Save a GPT-OSS with 2 layers and 70,000 random parameters in transformers' format."""
    torch.manual_seed(0)
    config = GptOssConfig(
        num_hidden_layers=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        hidden_size=64,
        intermediate_size=32,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=128,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"],
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    GptOssForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def count_differing_weights(first: Path, second: Path) -> int:
    """Count the bf16 weights of two Hugging Face directories whose bits differ."""
    left = load_file(first / "model.safetensors")
    right = load_file(second / "model.safetensors")
    if left.keys() != right.keys():
        raise ValueError(f"other tensors: {sorted(left.keys() ^ right.keys())}")
    return sum(
        int((left[name].view(torch.int16) != right[name].view(torch.int16)).sum()) for name in left
    )


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
    original = folder / "hugging_face"
    megatron = folder / "megatron"
    exported = folder / "exported"
    save_tiny_model(original)

    # The result is read back and compared before the directory gets its final name.
    read_back = import_checkpoint(original, megatron)
    print(f"{original} -> {megatron}: {read_back}")

    # A Megatron checkpoint of any parallel layout, imported or saved by a trainer.
    export_checkpoint(megatron, exported, dtype="bf16")
    print(f"{megatron} -> {exported}: {count_differing_weights(original, exported)} weights differ")

    # Compare all bits, then the outputs of each layer. A name table that is wrong in both directions
    # gives equal bits.
    print(verify(original, megatron))

    # The export is an ordinary Hugging Face directory.
    model = GptOssForCausalLM.from_pretrained(exported)
    print(f"transformers loads it: {sum(p.numel() for p in model.parameters()):,} parameters")


if __name__ == "__main__":
    main()
