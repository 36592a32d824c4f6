"""Rollout worker for episodes of external agents, with a gateway for its engine."""

import asyncio

from rl_loop.agents.episode import AgentRunner
from rl_loop.agents.process import AgentProcesses
from rl_loop.config.partial_configs import EpisodesConfig
from rl_loop.config.tasks import TaskConfig
from rl_loop.data.trajectory import Trajectory
from rl_loop.engines.backend import EngineFactory
from rl_loop.engines.protocol import SamplingParams
from rl_loop.environments import Task, environment_class, make_environment
from rl_loop.gateway.server import Gateway, GatewaySettings
from rl_loop.gateway.session import SessionSettings
from rl_loop.rollout.agent import RunnerFactory
from rl_loop.rollout.worker import RolloutWorker


def select_worker_class(tasks: TaskConfig) -> type[RolloutWorker]:
    """Return the class of the workers that run episodes of these tasks."""
    environments = [environment_class(source.environment) for source in tasks.sources.values()]
    if any(environment.uses_external_agent for environment in environments):
        return AgentRolloutWorker
    return RolloutWorker


class AgentRolloutWorker(RolloutWorker):
    """Serves its engine to external agents, for environments that use one."""

    def __init__(self, config: EpisodesConfig, engine_factory: EngineFactory, threads: int) -> None:
        super().__init__(config, engine_factory, threads)
        rollout = config.rollout
        sampling = SamplingParams(rollout.max_sampled_tokens_per_turn, top_p=rollout.top_p)
        # Loopback is enough, because agents run on the worker's machine.
        gateway = GatewaySettings(SessionSettings(limits=rollout, sampling=sampling))
        self.gateway = Gateway(self.engine, self.codec, self._shape, gateway)
        self.processes = AgentProcesses()
        self.agents = AgentRunner(self.gateway, self.processes, rollout)

    async def start(self) -> None:
        await super().start()
        await self.gateway.start()

    async def _run_episode(
        self,
        task: Task,
        seed: int,
        temperature: float,
        with_routes: bool,
        make_runner: RunnerFactory | None,
    ) -> Trajectory:
        environment = make_environment(task, self._execute, self.config.reward)
        # The sources of one run may be with and without agents.
        if not environment.uses_external_agent:
            return await super()._run_episode(task, seed, temperature, with_routes, make_runner)

        rollout = self.config.rollout
        return await self.agents.run_episode(
            task.task_id,
            environment,
            SamplingParams(rollout.max_sampled_tokens_per_turn, temperature, rollout.top_p),
            seed=seed,
            record_routes=rollout.routed_experts and with_routes,
        )

    async def close(self) -> None:
        # Agents that wait for an answer get an error before they are stopped.
        await self.gateway.close()
        await asyncio.gather(self.processes.close(), super().close())
