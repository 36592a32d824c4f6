"""Image: the files, commands and comments of the Dockerfile are correct.

No image is built, because that needs a network, base images and 30 minutes (docs/installing.md).
"""

from __future__ import annotations

import fnmatch
import os
import re
import shlex
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from launch.cluster import load_cluster

ROOT = Path(__file__).resolve().parents[1]
INSTALLING = (ROOT / "docs/installing.md").read_text()


def instructions() -> list[tuple[str, str]]:
    """(keyword, rest) of each instruction, without comments and with joined lines."""
    lines = [
        line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.startswith("#")
    ]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    pairs = [line.split(maxsplit=1) for line in joined.splitlines() if line.strip()]
    return [(keyword, rest) for keyword, rest in pairs]


def of_kind(keyword: str) -> list[str]:
    return [rest for word, rest in instructions() if word == keyword]


def stages() -> list[str]:
    return [rest.split(" AS ")[1] for rest in of_kind("FROM")]


def arguments() -> set[str]:
    return {rest.split("=")[0] for rest in of_kind("ARG")}


def run_command(part: str, log: Path, **variables: str) -> list[str]:
    """Run the RUN instruction that contains ``part``, and return the recorded commands.

    A program that only records its arguments replaces all interpreters of the instruction.
    """
    (command,) = [rest for rest in of_kind("RUN") if part in rest]
    python = log.parent / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(
        f'#!/bin/sh\necho "$NVTE_FRAMEWORK $NVTE_PYTORCH_FORCE_BUILD $MAX_JOBS $*" >> {log}\n'
    )
    python.chmod(0o755)
    (python.parent / "python3.12").symlink_to(python)
    log.touch()
    environment = {"PATH": f"{python.parent}:{os.environ['PATH']}", **variables}
    subprocess.run(["sh", "-ec", command], cwd=log.parent, env=environment, check=True)
    return log.read_text().splitlines()


def test_copied_files_exist_and_are_not_ignored() -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    copied = [rest for rest in of_kind("COPY") if not rest.startswith("--from")]
    sources = [source for rest in copied for source in rest.split()[:-1]]
    assert "requirements-gpu.txt" in sources and "launch/pinned/sglang.txt" in sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert not any(fnmatch.fnmatch(source, pattern) for pattern in ignored), source


def test_stages_build_on_stages_and_the_documentation_names_them() -> None:
    bases = [rest.split()[0] for rest in of_kind("FROM")]
    assert bases[0] == "${BASE}"
    assert all(base in stages() for base in bases[1:])
    assert set(re.findall(r"^\| `(\w+)` \|", INSTALLING, flags=re.M)) == set(stages()) - {"base"}


@pytest.mark.parametrize("text", ["docs/installing.md", "Dockerfile"])
def test_documented_builds_name_existing_arguments_and_stages(text: str) -> None:
    words = (ROOT / text).read_text().replace("\\\n", " ").split()
    targets = [words[i + 1] for i, word in enumerate(words) if word == "--target"]
    given = [words[i + 1].split("=")[0] for i, word in enumerate(words) if word == "--build-arg"]
    assert set(targets) - {"names"} == {"trainer"}
    assert set(given) == {"BASE", "PYTHON_PACKAGES", "GPU"} <= arguments()


@pytest.mark.parametrize(
    "file", ["requirements.txt", "requirements-gpu.txt", "launch/pinned/sglang.txt"]
)
def test_every_pin_has_a_version_and_hashes(file: str) -> None:
    text = (ROOT / file).read_text().replace("\\\n", " ")
    pins = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    assert all(re.match(r"[\w.\[\]-]+==\S+ .*--hash=sha256:[0-9a-f]{64}", pin) for pin in pins)
    (documented,) = re.findall(rf"^\| `{re.escape(file)}` \| (\d+)", INSTALLING, flags=re.M)
    assert len(pins) == int(documented)


def test_the_packages_without_a_wheel_are_those_of_the_bootstrap() -> None:
    (built,) = re.findall(r"--no-binary ([\w,]+)", (ROOT / "Dockerfile").read_text())
    assert f"without_wheel={built}\n" in (ROOT / "scripts/bootstrap.sh").read_text()
    pins = (ROOT / "requirements.txt").read_text()
    assert all(f"\n{name}==" in pins for name in built.split(","))


def test_gpu_packages_are_compiled_against_installed_torch(tmp_path: Path) -> None:
    (call,) = run_command("requirements-gpu.txt", tmp_path / "log", GPU="1", MAX_JOBS="3")
    assert call.startswith("pytorch TRUE 3 -m pip install ")
    assert {"--no-build-isolation", "--no-deps", "--require-hashes"} <= set(shlex.split(call))


def test_cpu_image_has_no_gpu_packages(tmp_path: Path) -> None:
    assert run_command("requirements-gpu.txt", tmp_path / "log", GPU="0", MAX_JOBS="3") == []


def test_image_has_code_and_a_vocabulary_for_every_user(
    tmp_path: Path,
) -> None:
    install, vocabulary = run_command("-e code", tmp_path / "log")
    assert install.endswith("-e code/kernels -e code")
    module = vocabulary.split()[-1]
    assert find_spec(module)
    # The cache of ``XDG_CACHE_HOME`` has the project's name.
    assert "TIKTOKEN_ENCODINGS_BASE=/opt/gptoss/megatron-gptoss" in of_kind("ENV")


def test_container_cluster_uses_interpreter_of_the_image() -> None:
    cluster = load_cluster(str(ROOT / "configs/cluster/slurm_container.yaml"))
    assert cluster.python == "python" and cluster.container is not None
    assert cluster.container.image in INSTALLING
    (path, *_) = [rest for rest in of_kind("ENV") if rest.startswith("PATH=")]
    assert path.startswith("PATH=/opt/gptoss/venv/bin:")
