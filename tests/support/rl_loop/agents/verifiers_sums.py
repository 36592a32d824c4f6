"""A ``verifiers`` taskset with a harness that asks once, for an interpreter with that package."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import httpx
import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str = ""


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace: Any) -> float:
        if "break" in self.data.prompt_text:
            raise RuntimeError("the scorer is out of order")
        said = trace.last_reply or ""
        return 1.0 if said.strip() == self.data.answer else 0.25


class AskOnceConfig(vf.HarnessConfig):
    pass


class AskOnce(vf.Harness[AskOnceConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        *rest: Any,
        **more: Any,
    ) -> Any:
        data = rest[1] if len(rest) > 1 else more["data"]
        _, prompt = self.resolve_prompt(data)
        text = prompt if isinstance(prompt, str) else prompt[-1].content
        async with httpx.AsyncClient(timeout=None) as http:
            answer = await http.post(
                f"{endpoint}/chat/completions",
                headers={"Authorization": f"Bearer {secret}"},
                json={"model": ctx.model, "messages": [{"role": "user", "content": text}]},
            )
        code = 0 if answer.status_code == 200 else 1
        return vf.ProgramResult(exit_code=code, stdout="", stderr=answer.text[:500])


class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self) -> Iterable[SumTask]:
        for a in range(4):
            prompt = f"What is {a} + 1?" if a < 3 else "break"
            yield SumTask(SumData(prompt=prompt, answer=str(a + 1)))


__all__ = ["AskOnce", "Sums"]
