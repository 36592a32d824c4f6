"""The viewer's server: responses, access control, and the files that it may read."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from importlib import resources
from pathlib import Path
from urllib.parse import quote

import pytest

from launch.viewer.episode_query import EpisodeQuery
from launch.viewer.metrics_tail import MetricsTail
from launch.viewer.run_view import find_runs
from launch.viewer.server import STATIC_FILES, open_server
from megatron_gptoss.user_error import UserError
from rl_loop.data.trajectory import TrajectoryGroup
from rl_loop.tracking.episode_recorder import EpisodeRecorder
from rl_loop.tracking.episode_table import SplitEpisodes
from tests.support.launch.viewer.served import ExampleRun, Served, served
from tests.support.recorded_episodes import VOCABULARY, failed, groups_of_step, train_split


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create two runs, with 30 and 3 steps of 4 episodes."""
    folder = tmp_path_factory.mktemp("runs")
    for name, steps in (("first", 30), ("second", 3)):
        ExampleRun(folder / name, steps=steps).close()
    (folder / "notes").mkdir()
    return folder


@pytest.fixture(scope="module")
def viewer(runs: Path) -> Iterator[Served]:
    with served(runs) as server:
        yield server


def episodes(viewer: Served, query: str = "", run: str = "first") -> dict:  # type: ignore[type-arg]
    answer = viewer.get(f"/api/runs/{run}/episodes?{query}")
    assert answer.status == 200, answer.body
    page: dict = answer.json  # type: ignore[type-arg]
    return page


# ---- runs and curves


def test_all_runs_of_a_directory_are_listed_with_their_health(viewer: Served) -> None:
    listed = {run["name"]: run for run in viewer.get("/api/runs").json["runs"]}
    assert set(listed) == {"first", "second"}
    first = listed["first"]
    assert (first["step"], first["steps"], first["state"]) == (30, 100, "running")
    assert first["headlines"]["reward"] == pytest.approx(29 / 20 - 1)
    assert {finding["level"] for finding in first["findings"]} == {"good"}
    checks = [finding["check"] for finding in first["findings"]]
    assert "importance ratio" in checks and "engine and trainer" in checks


def test_curves_are_columns_and_only_new_steps_are_sent(tmp_path: Path) -> None:
    run = ExampleRun(tmp_path / "run", steps=3)
    with served(tmp_path) as viewer:
        whole = viewer.get("/api/runs/run/curves").json
        assert whole["steps"] == [1, 2, 3]
        assert whole["metrics"]["reward"] == [-1.0, -0.95, -0.9]
        assert whole["descriptions"]["reward"] == "last over steps"

        run.add(2)
        known = f"generation={whole['generation']}&after=3"
        assert viewer.get(f"/api/runs/run/curves?{known}").json["steps"] == [4, 5]

        # An incomplete line is not read.
        with open(run.directory.metrics, "a") as file:
            file.write('{"step": 6, "time": 1')
        assert viewer.get(f"/api/runs/run/curves?{known}").json["steps"] == [4, 5]

        # A resume drops steps. A client with more steps gets the curve from the start.
        run.directory.delete_steps_after(2)
        again = viewer.get(f"/api/runs/run/curves?{known}").json
        assert (again["steps"], again["after"]) == ([1, 2], 0)
        assert again["generation"] > whole["generation"]
    run.close()


def test_unchanged_list_of_runs_is_not_sent_again(tmp_path: Path) -> None:
    run = ExampleRun(tmp_path / "run", steps=2)
    with served(tmp_path) as viewer:
        first = viewer.get("/api/runs").json
        again = viewer.get(f"/api/runs?known={first['version']}").json
        assert again == {"version": first["version"]}
        run.add(1)
        changed = viewer.get(f"/api/runs?known={first['version']}").json
        assert changed["version"] != first["version"] and changed["runs"][0]["step"] == 3
    run.close()


def test_concurrent_requests_read_each_line_once(tmp_path: Path) -> None:
    run = ExampleRun(tmp_path / "run", episodes=0)
    run.add(300)
    run.close()
    tail = MetricsTail(run.directory.metrics)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: tail.refresh(), range(64)))
    assert [record["step"] for record in tail.records] == list(range(1, 301))
    assert tail.newest()[-1] == tail.records[-1]


def test_only_two_or_more_known_runs_are_compared(viewer: Served) -> None:
    assert viewer.get("/api/compare?run=first&run=second").json == {
        "runs": ["first", "second"],
        "rows": [],
        "equal": 2,
    }
    assert viewer.get("/api/compare?run=first").status == 400
    assert viewer.get("/api/compare?" + "run=first&" * 13).status == 400
    assert viewer.get("/api/compare?run=first&run=..%2Fsecond").status == 404


@pytest.mark.parametrize("value", ["3", "[x]", "true", "{sources: 1, tags: {a: b}, steps: z}"])
def test_any_configuration_has_an_overview(value: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    sections = ("model", "tracking", "data", "tasks", "training", "algorithm")
    text = "".join(f"{section}: {value}\n" for section in sections)
    (tmp_path / "run" / "config.yaml").write_text(text)
    with served(tmp_path) as viewer:
        (listed,) = viewer.get("/api/runs").json["runs"]
    assert (listed["tags"], listed["data"], listed["steps"]) == ([], "", None)


def test_a_run_that_begins_later_appears(tmp_path: Path) -> None:
    with served(tmp_path) as viewer:
        assert viewer.get("/api/runs").json["runs"] == []
        (tmp_path / "new").mkdir()
        (tmp_path / "new" / "config.yaml").write_text("training: {steps: 5}\n")
        (run,) = viewer.get("/api/runs").json["runs"]
        assert (run["name"], run["state"], run["step"]) == ("new", "waiting", None)
        assert viewer.get("/api/runs/new/curves").json["steps"] == []
        assert episodes(viewer, run="new")["total"] == 0
        assert "steps: 5" in viewer.get("/api/runs/new/config").json["config"]


def test_runs_with_equal_names_are_distinguished(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder / "run").mkdir(parents=True)
        (tmp_path / folder / "run" / "config.yaml").touch()
    names = sorted(find_runs([tmp_path / "a", tmp_path / "b", tmp_path / "a" / "run"]))
    assert len(names) == 2
    assert names[0].endswith("a-run") and names[1].endswith("b-run")
    assert not any("/" in name for name in names)


def test_a_value_that_is_not_finite_is_named(tmp_path: Path) -> None:
    run = ExampleRun(tmp_path / "run", steps=2)
    run.add(1, grad_norm=float("nan"))
    run.close()
    with served(tmp_path) as viewer:
        (listed,) = viewer.get("/api/runs").json["runs"]
        assert listed["findings"][0]["level"] == "bad"
        assert "grad_norm" in listed["findings"][0]["message"]
        assert viewer.get("/api/runs/run/curves").json["metrics"]["grad_norm"][-1] is None


def test_viewer_shows_why_a_run_ended(tmp_path: Path) -> None:
    run = ExampleRun(tmp_path / "run", steps=2)
    run.close()
    holder = f"process {2**22 + 1} on {socket.gethostname()} since 2026-01-01 00:00:00\n"
    (run.directory.path / "run.lock").write_text(holder)
    (run.directory.path / "error.log").write_text("Traceback\n  ...\nRuntimeError: out of luck\n")
    with served(tmp_path) as viewer:
        (listed,) = viewer.get("/api/runs").json["runs"]
        assert listed["state"] == "stopped"
        assert listed["findings"][0]["message"] == "RuntimeError: out of luck"

        holder = f"process {os.getpid()} on {socket.gethostname()} since 2026-01-01 00:00:00\n"
        (run.directory.path / "run.lock").write_text(holder)
        (listed,) = viewer.get("/api/runs").json["runs"]
        assert listed["state"] == "running"


# ---- episodes


def test_episodes_are_paged_newest_first(viewer: Served) -> None:
    first = episodes(viewer, "limit=50")
    assert (first["total"], first["recorded"], len(first["rows"])) == (120, 120, 50)
    second = episodes(viewer, "limit=50&offset=50")
    third = episodes(viewer, "limit=50&offset=100")
    ids = [row["id"] for page in (first, second, third) for row in page["rows"]]
    assert len(ids) == 120
    assert ids == sorted(ids, reverse=True)
    assert episodes(viewer, "offset=1000")["rows"] == []


@pytest.mark.parametrize(
    ("query", "total"),
    [
        ("step_from=10&step_to=12", 12),
        ("reward_from=0.5", 60),
        ("reward_to=0", 60),
        ("task=SUM/7-1", 2),
        ("split=held_out", 0),
        ("split=train", 120),
        ("finish=max_turns", 60),
        ("finish=invalid", 0),
        ("tools=errors", 60),
        ("tools=calls", 120),
        ("tools=none", 0),
        ("group=0&step_from=3&step_to=3&split=train", 2),
        ("text=the%20answer%20is%205", 60),
        ("text=nobody", 0),
        ("text=answer%20is%205&reward_from=0", 0),
        ("step_from=&task=&text=", 120),
    ],
)
def test_filters_combine(viewer: Served, query: str, total: int) -> None:
    page = episodes(viewer, query)
    assert page["total"] == total
    assert page["searched"] == page["recorded"] == 120


def test_a_column_sorts_the_table(viewer: Served) -> None:
    rewards = [row["reward"] for row in episodes(viewer, "sort=reward&limit=120")["rows"]]
    assert rewards == [1.0] * 60 + [-1.0] * 60
    ascending = episodes(viewer, "sort=reward&descending=false&limit=70")["rows"]
    assert [row["reward"] for row in ascending] == [-1.0] * 60 + [1.0] * 10
    # Equal rewards are sorted newest first in both directions.
    assert [row["step"] for row in ascending[:2]] == [30, 30]


FIRST_PAGES = """
import sys
from pathlib import Path

from launch.viewer.episode_query import EpisodeQuery, run_query
from launch.viewer.server import Viewer

viewer = Viewer([Path(sys.argv[1])])
print([run["step"] for run in viewer._overviews(60)])
for sort in ("id", "reward"):
    print(len(run_query(viewer._runs["first"].episodes, EpisodeQuery(sort=sort)).rows))
print("pandas" in sys.modules)
"""


def test_first_pages_do_not_import_pandas(runs: Path) -> None:
    """pyarrow imports pandas in many conversions. It takes longer than the first page."""
    done = subprocess.run(
        [sys.executable, "-c", FIRST_PAGES, str(runs)], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["[30, 3]", "50", "50", "False"]


def test_rows_without_a_value_are_sorted_last(tmp_path: Path) -> None:
    run = ExampleRun(tmp_path / "run")
    run.close()
    group = groups_of_step(0, tasks=1)[0]
    group.invalid.append(failed("sum/0-0"))
    with EpisodeRecorder(run.directory.episodes, VOCABULARY, "all") as recorder:
        recorder.record(0, [train_split([group])])
    with served(tmp_path) as viewer:
        for direction in ("true", "false"):
            rows = episodes(viewer, f"sort=reward&descending={direction}", run="run")["rows"]
            assert [row["reward"] for row in rows][-1] is None
        (invalid,) = episodes(viewer, "finish=invalid", run="run")["rows"]
        assert invalid["invalid_reason"] == "bwrap: no memory"
        # An invalid episode has no reward and matches no condition on it.
        assert episodes(viewer, "reward_to=5", run="run")["total"] == 2


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("color=red", "unknown filter 'color'"),
        ("limit=many", "limit: 'many' is not a number"),
        ("reward_from=nan", "reward_from: 'nan' is not a number"),
        ("limit=501", "limit from 1 to 500"),
        ("offset=-1", "offset must be"),
        ("sort=turns", "sort: 'turns' is not one of"),
        ("tools=some", "tools: 'some' is not one of"),
        ("descending=maybe", "descending: 'maybe' is neither"),
    ],
)
def test_a_filter_that_cannot_be_read_is_named(viewer: Served, query: str, message: str) -> None:
    answer = viewer.get(f"/api/runs/first/episodes?{query}")
    assert answer.status == 400
    assert message in answer.json["error"]


def test_episode_has_messages_tokens_and_trainer_values(viewer: Served) -> None:
    row = episodes(viewer, "step_from=5&step_to=5&sort=sample&descending=false")["rows"][0]
    episode = viewer.get(f"/api/runs/first/episodes/{row['id']}").json
    messages = [
        (m["role"], m["channel"], m["recipient"], m["text"], m["ended_by"], m["is_sampled"])
        for m in episode["messages"]
    ]
    assert messages == [
        ("user", None, None, "Compute 2 + 2", "<|end|>", False),
        ("assistant", "commentary", "python", "print(2 + 2)", "<|call|>", True),
        ("python", "commentary", "assistant", "4", "<|end|>", False),
        ("assistant", "final", None, "The answer is 4", "<|return|>", True),
    ]
    tokens = len(episode["token_ids"])
    columns = ("texts", "loss_mask", "rollout_log_probs", "trainer_log_probs", "advantages")
    assert {len(episode[column]) for column in (*columns, "entropy")} == {tokens}
    assert (episode["messages"][0]["start"], episode["messages"][-1]["end"]) == (0, tokens)
    assert {span["version"] for span in episode["weight_versions"]} == {5}


def test_an_episode_that_is_not_there_is_a_404(viewer: Served) -> None:
    assert viewer.get("/api/runs/first/episodes/12345678").status == 404
    assert viewer.get("/api/runs/first/episodes/x").status == 404
    assert viewer.get("/api/runs/third/episodes").status == 404


def test_new_episodes_appear_during_a_run(tmp_path: Path) -> None:
    run = ExampleRun(tmp_path / "run", steps=2)
    with served(tmp_path) as viewer:
        assert episodes(viewer, run="run")["total"] == 8
        assert episodes(viewer, "text=compute", run="run")["total"] == 8
        run.add(40)  # merges files while the reader is open
        assert episodes(viewer, run="run")["total"] == 168
        page = episodes(viewer, "text=compute", run="run")
        assert (page["total"], page["searched"]) == (168, 168)
    run.close()


def test_numbers_that_json_cannot_write_become_null(tmp_path: Path) -> None:
    run = ExampleRun(tmp_path / "run")
    run.close()
    group = TrajectoryGroup("task", [], [failed("task")])
    group.invalid[0].rollout_log_probs[9] = float("-inf")
    with EpisodeRecorder(run.directory.episodes, VOCABULARY, "all") as recorder:
        recorder.record(0, [SplitEpisodes("train", [group])])
    with served(tmp_path) as viewer:
        body = viewer.get("/api/runs/run/episodes/0").body.decode()

        def refuse(text: str) -> None:
            raise AssertionError(f"{text} is no JSON")

        assert json.loads(body, parse_constant=refuse)["rollout_log_probs"][9] is None


# ---- access control


TRAVERSALS = [
    "/static/../server.py",
    "/static/..%2Fserver.py",
    "/static/%2e%2e/server.py",
    "/static//etc/passwd",
    "/static/%2Fetc%2Fpasswd",
    "/api/runs/../../etc/config",
    "/api/runs/..%2F..%2Fetc/config",
    "/api/runs/..%2Ffirst/config",
    "/api/runs/first%2F..%2Fsecond/config",
    "/api/runs/%2Fetc/config",
    "/api/runs/notes/config",
    "/api/runs/first/episodes/..%2F..%2Fconfig.yaml",
    "/../../etc/passwd",
]


@pytest.mark.parametrize("path", TRAVERSALS)
def test_no_request_path_leaves_the_runs_directory(viewer: Served, path: str) -> None:
    answer = viewer.get(path)
    assert answer.status == 404
    assert set(answer.json) == {"error"}


def test_no_absolute_path_is_a_run(viewer: Served, runs: Path) -> None:
    path = quote(str(runs / "first"), safe="")
    assert viewer.get(f"/api/runs/{path}/config").status == 404


def test_every_response_forbids_external_content(viewer: Served) -> None:
    for path in ("/", "/static/app.js", "/api/runs", "/nothing", "/api/runs/first/episodes?x=1"):
        headers = viewer.get(path).headers
        policy = headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert "unsafe" not in policy and "http" not in policy
        assert headers["X-Content-Type-Options"] == "nosniff"


def test_page_consists_of_files_of_the_package(viewer: Served) -> None:
    page = viewer.get("/")
    assert page.status == 200
    assert page.headers["Content-Type"].startswith("text/html")
    for name in STATIC_FILES:
        assert viewer.get(f"/static/{name}").body == STATIC_FILES[name]
    text = b"".join(body for name, body in STATIC_FILES.items() if name.endswith((".html", ".css")))
    assert b"//" not in text.replace(b"http://www.w3.org", b"").replace(b"https://github.com", b"")


def test_vendored_files_lie_in_third_party_with_a_license() -> None:
    viewer = resources.files("launch.viewer")
    for file in (viewer / "static").iterdir():
        assert b"Copyright" not in file.read_bytes(), file.name
    vendored = {file.name for file in (viewer / "third_party").iterdir()}
    assert {"uPlot.iife.js", "uPlot.min.css", "uPlot.LICENSE.txt"} <= vendored
    assert vendored - {"README.md"} <= set(STATIC_FILES)


def test_the_server_only_reads(viewer: Served) -> None:
    for method in ("POST", "PUT", "DELETE"):
        assert viewer.get("/api/runs", method=method).status == 405


def test_unknown_host_name_of_this_machine_is_rejected(viewer: Served) -> None:
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", ""):
        answer = viewer.get("/api/runs", headers={"Host": host})
        assert answer.status == 403, host
    for host in ("localhost:1", "127.0.0.1", "[::1]:8642"):
        assert viewer.get("/api/runs", headers={"Host": host}).status == 200, host


def test_token_is_required_and_removed_from_the_address(runs: Path) -> None:
    with served(runs, ask_for_token=True) as viewer:
        token = viewer.address.partition("?token=")[2]
        assert len(token) > 20
        for path in (
            "/",
            "/?token=wrong",
            "/api/runs",
            f"/api/runs?token={token}",
            "/static/app.js",
        ):
            assert viewer.get(path).status == 403, path

        opened = viewer.get(f"/?token={token}")
        assert (opened.status, opened.headers["Location"]) == (303, "/")
        cookie = opened.headers["Set-Cookie"]
        assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
        with_cookie = {"Cookie": cookie.partition(";")[0]}
        assert viewer.get("/", with_cookie).status == 200
        assert viewer.get("/api/runs", with_cookie).status == 200
        assert viewer.get("/api/runs", {"Authorization": f"Bearer {token}"}).status == 200
        assert viewer.get("/api/runs", {"Cookie": "gptoss_view=wrong"}).status == 403
        assert viewer.get("/api/runs", {"Cookie": "gptoss_view=\xe9"}).status == 403


def test_addresses_beyond_loopback_always_need_a_token(runs: Path) -> None:
    opened = [open_server([runs], host, 0, False) for host in ("0.0.0.0", "127.0.0.1")]
    for server in opened:
        server.listener.close()
    assert "?token=" in opened[0].address
    assert "?token=" not in opened[1].address


def test_viewer_reports_mistakes_before_it_starts(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a directory"):
        open_server([tmp_path / "missing"], "127.0.0.1", 0, False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"cannot listen on 127\.0\.0\.1:{port}.*--port"):
            open_server([runs], "127.0.0.1", port, False)


# ---- untrusted parameters and directories

ODD_VALUES = [
    "9" * 30,
    "-" + "9" * 30,
    "9223372036854775808",
    "1e400",
    "nan",
    "%00",
    "%ff",
    "x" * 5000,
]


@pytest.mark.parametrize("name", [field.name for field in fields(EpisodeQuery)])
def test_any_filter_values_give_a_response(name: str, viewer: Served) -> None:
    for value in ODD_VALUES:
        answer = viewer.get(f"/api/runs/first/episodes?{name}={value}")
        assert answer.status in (200, 400), (value, answer.body[:300])


@pytest.mark.parametrize("value", ["9" * 30, "-1", "-" + "9" * 30])
def test_odd_query_numbers_give_a_response(value: str, viewer: Served) -> None:
    assert viewer.get(f"/api/runs/first/episodes/{value}").status == 404
    for name in ("after", "generation"):
        assert viewer.get(f"/api/runs/first/curves?{name}={value}").status == 200


READ_BY_VIEWER = (
    "config.yaml", "metrics.jsonl", "metrics.describe.json", "summary.json", "error.log", "run.lock",
    "episodes/000000-000009.parquet",
)  # fmt: skip
PAGES = ("/api/runs", "/api/runs/run/config", "/api/runs/run/curves", "/api/runs/run/episodes")


@pytest.mark.parametrize("kind", ["link", "pipe"])
@pytest.mark.parametrize("name", READ_BY_VIEWER)
def test_viewer_reads_own_files_only(name: str, kind: str, tmp_path: Path) -> None:
    """A run directory may be untrusted. Its files may be links to private files of the reader."""
    secret = tmp_path / "secret"
    secret.write_text('{"step": 1, "mark": 4711.25, "text": "4711.25"}\n')
    run = ExampleRun(tmp_path / "runs" / "run", steps=1)
    run.close()
    file = run.directory.path / name
    if file.exists():
        file.unlink()
    if kind == "link":
        file.symlink_to(secret)
    else:
        os.mkfifo(file)
    with served(tmp_path / "runs") as viewer:
        for page in PAGES:
            answer = viewer.get(page)
            assert answer.status == 200
            assert b"4711" not in answer.body


def test_overview_shows_if_episodes_exist(tmp_path: Path) -> None:
    ExampleRun(tmp_path / "with", steps=1).close()
    ExampleRun(tmp_path / "without").close()
    with served(tmp_path) as viewer:
        runs = viewer.get("/api/runs").json["runs"]
    assert {run["name"]: run["has_episodes"] for run in runs} == {"with": True, "without": False}
