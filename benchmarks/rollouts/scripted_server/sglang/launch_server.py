"""Mock of ``python -m sglang.launch_server`` that samples scripted turns.

It implements SGLang's protocol. ``SCRIPT`` names a file written by
``benchmarks.rollouts.concurrent.write_script``.
"""

import json
import os
from pathlib import Path
from typing import Any

from benchmarks.rollouts.slow_tools import draw_call_count
from tests.support.rl_loop.sglang_protocol import LocalServer, main, sampled_of_turn


class ScriptedServer(LocalServer):
    """Server that calls the tool as often as the episode's name defines, and then answers."""

    def __init__(self, script: dict[str, Any]) -> None:
        super().__init__(
            faults=script["faults"], seed=os.getpid(), token_seconds=script["token_seconds"]
        )
        self._call: list[int] = script["call"]
        self._answer: list[int] = script["answer"]
        self._header: list[int] = script["header"]
        self._fault_log = Path(script["fault_log"])

    def sample(self, ids: list[int], body: dict[str, Any], state: int) -> int:
        # The text after each header is a turn of the policy, so the prompt defines the position in
        # the script. A turn can resume anywhere, also after another server has started it.
        calls_so_far = ids.count(self._call[-1])
        episode = body["rid"].rsplit("/", 2)[0]
        turn = self._call if calls_so_far < draw_call_count(episode) else self._answer
        return turn[sampled_of_turn(ids, self._header)]

    def note_fault(self, fault: str) -> None:
        with self._fault_log.open("a") as log:
            log.write(f"{fault}\n")


if __name__ == "__main__":
    main(ScriptedServer(json.loads(Path(os.environ["SCRIPT"]).read_text())))
