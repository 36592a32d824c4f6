"""Arguments and options that several commands take."""

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from launch.completion import complete_config, complete_override

ConfigFile = Annotated[
    Path,
    Argument(
        metavar="CONFIG",
        help="A YAML file, such as configs/rl/tiny_retool.yaml, or the name of a shipped one.",
        autocompletion=complete_config,
    ),
]
TrainingCommand = Literal["rl", "sft"]
Overrides = Annotated[
    list[str] | None,
    Argument(
        metavar="[KEY=VALUE]...",
        help="Replace values of the file: optimizer.lr=1e-6.",
        autocompletion=complete_override,
    ),
]
Resume = Annotated[
    bool,
    Option(
        "--resume",
        help="Continue the run from its newest checkpoint, with what CONFIG now says.",
    ),
]
ResumeOrNew = Annotated[
    bool,
    Option("--resume-or-new", help="Continue the run if there is one, else begin it."),
]
Overwrite = Annotated[
    bool,
    Option("--overwrite", help="Delete an earlier run of the same name first."),
]
OfSft = Annotated[bool, Option("--sft", help="CONFIG is one of `gptoss sft`.")]
