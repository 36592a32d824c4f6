"""``python -m sglang.launch_server``, which speaks SGLang's protocol and samples what a script says.

``SCRIPT`` names a file that ``concurrent_episodes.write_script`` has written."""

import json
import os
from pathlib import Path
from typing import Any

from benchmarks.rollouts.slow_tools import calls_of
from tests.support.rl_loop.sglang_protocol import LocalServer, main, sampled_of_turn


class ScriptedServer(LocalServer):
    """Calls the tool as often as the episode's name says, and answers then."""

    def __init__(self, script: dict[str, Any]) -> None:
        super().__init__(
            faults=script["faults"], seed=os.getpid(), token_seconds=script["token_seconds"]
        )
        self._call: list[int] = script["call"]
        self._answer: list[int] = script["answer"]
        self._header: list[int] = script["header"]
        self._fault_log = Path(script["fault_log"])

    def sample(self, ids: list[int], body: dict[str, Any], state: int) -> int:
        # The policy's turns are what follows each header, so the text says how far the script is:
        # a turn goes on anywhere, also one that another server has begun.
        calls_so_far = ids.count(self._call[-1])
        episode = body["rid"].rsplit("/", 2)[0]
        turn = self._call if calls_so_far < calls_of(episode) else self._answer
        return turn[sampled_of_turn(ids, self._header)]

    def note_fault(self, fault: str) -> None:
        with self._fault_log.open("a") as log:
            log.write(f"{fault}\n")


if __name__ == "__main__":
    main(ScriptedServer(json.loads(Path(os.environ["SCRIPT"]).read_text())))
