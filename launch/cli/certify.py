"""``gptoss certify``: check that a trainer or an engine computes GPT-OSS."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Argument, Option

from launch.cli.groups import GroupWithDefault

certificate = typer.Typer(
    cls=GroupWithDefault,
    no_args_is_help=True,
    help="gptoss certify SUBJECT: does a trainer or an engine compute GPT-OSS? "
    "Options: gptoss certify run --help.",
)
WeightsSize = Annotated[
    Literal["tiny", "small", "gpu"],
    Option(help="tiny: for tests. small: GPT-OSS's window and lengths. gpu: widths for kernels."),
]
StoredPrecision = Annotated[
    Literal["fp32", "bf16"],
    Option("--precision", help="In which weights are made, and the subject computes."),
]


@certificate.command("run")
def certify_run(
    subject: Annotated[
        str,
        Argument(
            help="transformers, trainer, MODULE:FUNCTION, or the URL of a server: SGLang's "
            "(http://127.0.0.1:30000), or one of OpenAI's completions (it ends with /v1).",
        ),
    ],
    weights: Annotated[
        Path | None,
        Option(
            help="What `gptoss certify prepare` wrote, or a Hugging Face directory. Without it "
            "weights are made; a server was started with those that are meant.",
        ),
    ] = None,
    size: WeightsSize = "small",
    precision: StoredPrecision = "fp32",
    deterministic: Annotated[
        bool,
        Option("--deterministic", help="The server claims equal bits: anything else fails."),
    ] = False,
    only: Annotated[
        list[str] | None,
        Option(help="A check to run, by name; may be given several times. Agreement always runs."),
    ] = None,
    out: Annotated[
        Path,
        Option(help="Where certificate.txt, certificate.json and certificate.html go."),
    ] = Path("certificate"),
) -> None:
    """Check everything that GPT-OSS's implementations get wrong, and name what is wrong. Exit code
    1 if a check fails."""
    from rl_loop.certify.run import CertifyOptions, certify, check_subject_name

    check_subject_name(subject, has_weights=weights is not None)

    from launch.certificate_page import write_certificate
    from rl_loop.certify.certificate import CheckResult
    from rl_loop.certify.model import prepared

    def show(result: CheckResult) -> None:
        print(f"{result.status.value:11}  {result.name}", file=sys.stderr, flush=True)

    with prepared(weights, size, precision) as directory:
        options = CertifyOptions(
            subject=subject,
            weights=directory,
            precision=precision,
            deterministic=deterministic,
            only=tuple(only or ()),
        )
        result = certify(options, show)
    print(result.to_text())
    print(f"certificate: {write_certificate(result, out)}")
    raise typer.Exit(0 if result.has_passed else 1)


@certificate.command("prepare")
def certify_prepare(
    directory: Annotated[Path, Argument(help="Gets first/ and second/, two models.")],
    size: WeightsSize = "small",
    precision: StoredPrecision = "fp32",
) -> None:
    """Make the weights of a certificate: for a server that has to be started with them."""
    from rl_loop.certify.model import FIRST, prepare

    prepare(directory, size, precision)
    print(directory / FIRST)
