"""``gptoss certify``: check that a trainer or an engine computes GPT-OSS."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Argument, Option

from launch.cli.groups import GroupWithDefault

commands = typer.Typer(
    cls=GroupWithDefault,
    no_args_is_help=True,
    help="gptoss certify IMPLEMENTATION: check that a trainer or an engine computes GPT-OSS. "
    "Options: gptoss certify run --help.",
)
WeightsSize = Annotated[
    Literal["tiny", "small", "gpu"],
    Option(
        help="tiny: for tests. small: window and lengths of GPT-OSS. gpu: widths that GPU kernels "
        "need."
    ),
]
Precision = Annotated[
    Literal["fp32", "bf16"],
    Option("--precision", help="Precision of weights and implementation."),
]


@commands.command("run")
def certify_run(
    implementation: Annotated[
        str,
        Argument(
            help="transformers, trainer, MODULE:FUNCTION, or the URL of a server: SGLang's "
            "(http://127.0.0.1:30000), or one of OpenAI's completions (it ends with /v1).",
        ),
    ],
    weights: Annotated[
        Path | None,
        Option(
            help="Directory that `gptoss certify prepare` printed, or another Hugging Face directory. "
            "Required for servers, which must have been started with these weights. Default: new weights.",
        ),
    ] = None,
    size: WeightsSize = "small",
    precision: Precision = "fp32",
    deterministic: Annotated[
        bool,
        Option("--deterministic", help="Fail unless the server's results are bitwise equal."),
    ] = False,
    only: Annotated[
        list[str] | None,
        Option(help="Name of a check to run. Repeatable. `agreement` always runs."),
    ] = None,
    out: Annotated[
        Path,
        Option(help="Directory for report.txt, report.json and report.html."),
    ] = Path("certify_report"),
) -> None:
    """Check for all known mistakes of GPT-OSS implementations, and name those found.

    Exit code 1 if a check fails.
    """
    # Check the name before the imports below, which take seconds.
    from rl_loop.certify.run import CertifyOptions, certify, check_implementation_name

    check_implementation_name(implementation, has_weights=weights is not None)

    from launch.certify_report import write_report
    from rl_loop.certify.model import prepare_model
    from rl_loop.certify.report import CheckResult

    # On standard error, because standard output has the report.
    def show(result: CheckResult) -> None:
        print(f"{result.status.value:11}  {result.name}", file=sys.stderr, flush=True)

    # Temporary weights are deleted afterwards, given ones are kept.
    with prepare_model(weights, size, precision) as directory:
        options = CertifyOptions(
            implementation=implementation,
            weights=directory,
            precision=precision,
            deterministic=deterministic,
            only=tuple(only or ()),
        )
        result = certify(options, show)
    print(result.to_text())
    print(f"report: {write_report(result, out)}")
    raise typer.Exit(0 if result.has_passed else 1)


@commands.command("prepare")
def certify_prepare(
    directory: Annotated[Path, Argument(help="Directory for two models, first/ and second/.")],
    size: WeightsSize = "small",
    precision: Precision = "fp32",
) -> None:
    """Create the weights of the checks, for a server that must be started with them."""
    from rl_loop.certify.model import FIRST, prepare

    prepare(directory, size, precision)
    print(directory / FIRST)
