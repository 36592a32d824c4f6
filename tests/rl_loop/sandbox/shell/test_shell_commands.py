"""Commands, files, forks and limits of shell sandboxes."""

from __future__ import annotations

import asyncio
import time

import pytest

from rl_loop.sandbox import SandboxError
from rl_loop.sandbox.shell import HOST_IMAGE, SandboxFile, SandboxFilesError
from tests.support.rl_loop.sandbox.shells import Shells


def test_command_returns_output_status_and_time(shells: Shells) -> None:
    with shells.open() as shell:
        result = shell.run("echo out; echo err >&2; sleep 0.05; exit 3")
    assert (result.output, result.exit_code, result.error) == ("out\nerr\n", 3, None)
    assert 0.05 <= result.seconds < 60
    assert not result.timed_out and not result.truncated


def test_each_command_has_a_new_bash_by_default(shells: Shells) -> None:
    with shells.open() as shell:
        shell.run("cd /tmp; x=1; touch kept")
        assert shell.output('echo "$PWD-${x:-unset}"; ls /tmp') == "/-unset\nkept\n"


def test_persistent_bash_keeps_directory_and_variables(shells: Shells) -> None:
    with shells.open() as shell:
        first = shell.run("cd /tmp; x=1; f() { echo called; }", persistent=True)
        second = shell.run("echo $PWD $x; f; (exit 5)", persistent=True)
        assert (first.new_shell, second.new_shell) == (True, False)
        assert (second.output, second.exit_code) == ("/tmp 1\ncalled\n", 5)
        assert second.working_directory == "/tmp"

        ended = shell.run("exit 4", persistent=True)
        assert (ended.interpreter_ended, ended.exit_code) == (True, 4)
        again = shell.run("echo $PWD ${x:-unset}", persistent=True)
        assert (again.new_shell, again.output) == (True, "/tmp unset\n")


def test_time_limit_kills_every_process(shells: Shells) -> None:
    with shells.open() as shell:
        shell.run("(setsid sleep 600 >/dev/null 2>&1 &)")
        result = shell.run("echo begun; sleep 600", seconds=0.5)
        assert (result.timed_out, result.killed_for, result.exit_code) == (True, "time", -9)
        assert result.output == "begun\n"
        assert result.error == "killed: it ran longer than 0.5 s"
        assert result.processes == 0


def test_background_processes_continue_between_commands(shells: Shells) -> None:
    with shells.open() as shell:
        server = "python3 -m http.server 80 -b 127.0.0.1 -d /etc"
        started = shell.run(f"{server} >/dev/null 2>&1 & echo started")
        assert (started.output, started.processes) == ("started\n", 1)
        read = "import urllib.request as r; print(r.urlopen('http://127.0.0.1/group').read())"
        fetch = f'for i in $(seq 100); do python3 -c "{read}" 2>/dev/null && break; sleep 0.1; done'
        assert shell.output(fetch) == "b'root:x:0:\\n'\n"
        shell.wait_for(shell.sandbox.end_processes())
        assert shell.run("true").processes == 0


def test_output_keeps_head_and_tail(shells: Shells) -> None:
    with shells.open(output_bytes=1000) as shell:
        result = shell.run("seq 10000")
    assert result.truncated
    assert result.output.startswith("1\n2\n3\n") and result.output.endswith("9999\n10000\n")
    assert "[... 47894 bytes left out ...]" in result.output
    assert len(result.output) < 1100


def test_memory_limit_names_itself_and_spares_files(shells: Shells) -> None:
    with shells.open(memory_bytes=100 << 20, disk_bytes=400 << 20) as shell:
        # Files have a separate limit.
        assert shell.run("head -c 200000000 /dev/zero > /tmp/x").killed_for is None
        result = shell.run("python3 -c 'b = bytearray(b\"x\") * (300 << 20)'")
        assert (result.killed_for, result.error) == (
            "memory",
            "killed: more than 0.104858 GB of memory",
        )


def test_daemon_beyond_the_memory_limit_is_reported_later(shells: Shells) -> None:
    with shells.open(memory_bytes=100 << 20) as shell:
        code = "import time; time.sleep(0.3); b = bytearray(b'x') * (300 << 20); time.sleep(600)"
        shell.run(f'(setsid python3 -c "{code}" >/dev/null 2>&1 &)')
        deadline = time.monotonic() + 60
        while shell.wait_for(shell.sandbox.usage()).processes and time.monotonic() < deadline:
            time.sleep(0.1)
        result = shell.run("echo next")
        assert (result.output, result.exit_code) == ("next\n", 0)
        assert result.error == "background processes were killed: more than 0.104858 GB of memory"


def test_files_are_put_and_taken(shells: Shells) -> None:
    with shells.open() as shell:
        files = {"/app/run.sh": SandboxFile(b"#!/bin/sh\necho ran\n", 0o755), "/app/ä/x": b"data"}
        shell.wait_for(shell.sandbox.write_files(files))
        assert shell.output("/app/run.sh; cat /app/ä/x") == "ran\ndata"
        shell.run(
            "cd /app; echo more >> run.sh; ln -s run.sh link; mkfifo pipe; mkdir d; echo y > d/y"
        )
        taken = shell.wait_for(
            shell.sandbox.read_changed_files(["/app", "/etc/passwd", "/missing", "/../x"])
        )
    # Files of the image that did not change are not taken.
    assert sorted(taken.files) == ["/app/d/y", "/app/run.sh", "/app/ä/x"]
    assert taken.files["/app/run.sh"] == SandboxFile(b"#!/bin/sh\necho ran\nmore\n", 0o755)
    assert taken.skipped == {
        "/app/link": "not a regular file",
        "/app/pipe": "not a regular file",
        "/../x": "not a path below /",
    }


def test_taken_files_never_leave_the_changed_files(shells: Shells) -> None:
    with shells.open() as shell:
        shell.run(
            "mkdir /a; ln -s /etc /a/etc; ln -s /proc/1 /p; mkdir /big; truncate -s 900M /big/x"
        )
        taken = shell.wait_for(
            shell.sandbox.read_changed_files(["/a/etc/passwd", "/p/environ", "/big"])
        )
    assert taken.files == {}
    assert taken.skipped == {
        "/a/etc/passwd": "Not a directory on the way",
        "/p/environ": "Not a directory on the way",
        "/big/x": "above the limit of size or number",
    }


def test_files_without_permission_are_taken(shells: Shells) -> None:
    with shells.open() as shell:
        shell.run("mkdir /a; echo x > /a/x; chmod 000 /a/x /a")
        taken = shell.wait_for(shell.sandbox.read_changed_files(["/a"]))
    assert taken.files["/a/x"].contents == b"x\n"


def test_put_into_a_full_disk_is_refused_and_no_failure(shells: Shells) -> None:
    with shells.open(disk_bytes=1 << 20) as shell:
        shell.run("dd if=/dev/zero of=/x bs=1M count=5")
        with pytest.raises(SandboxFilesError, match="/app/y: No space left on device"):
            shell.wait_for(shell.sandbox.write_files({"/app/y": b"z" * 5000}))
        assert shell.output("rm /x; echo works") == "works\n"


def test_fork_has_the_files_of_the_snapshot(shells: Shells) -> None:
    with shells.open() as shell:
        shell.run(
            "mkdir -p /w/a; echo one > /w/a/x; ln /w/a/x /w/hard; ln -s a/x /w/soft; chmod 700 /w/a/x;"
            "rm /etc/group; rm -r /home; mkdir /home; echo new > /home/file; mkfifo /w/pipe;"
            "echo raw > $'/w/\\xff'"
        )
        layer = shell.wait_for(shells.pool.snapshot(shell.sandbox))
        shell.run("echo later > /w/a/x")
        image = shells.image.with_layer(layer)
    look = "cat /w/soft /w/hard; stat -c '%a %h' /w/a/x; ls /etc/group 2>&1; ls /home; ls /w; wc -c /etc/hosts"
    with shells.open(image) as one, shells.open(image) as other:
        one.run("echo changed > /w/a/x")
        assert one.output("cat /w/$'\\xff'") == "raw\n"
        assert other.output(look) == (
            "one\none\n700 2\nls: cannot access '/etc/group': No such file or directory\n"
            "file\na\nhard\nsoft\n\ufffd\n42 /etc/hosts\n"
        )
        # Forks of forks.
        layer2 = shell.wait_for(shells.pool.snapshot(one.sandbox))
    with shells.open(image.with_layer(layer2)) as fork:
        assert fork.output("cat /w/a/x") == "changed\n"
    for each in (layer, layer2):
        shells.pool.store.delete_snapshot(each)


def test_snapshot_continues_the_processes(shells: Shells) -> None:
    with shells.open() as shell:
        shell.run("(setsid sh -c 'while :; do date >> /tick; sleep 0.02; done' >/dev/null 2>&1 &)")
        layer = shell.wait_for(shells.pool.snapshot(shell.sandbox))
        shells.pool.store.delete_snapshot(layer)
        shell.run("wc -l < /tick > /before; sleep 0.5")
        assert (
            shell.output("[ $(wc -l < /tick) -gt $(cat /before) ] && echo continues")
            == "continues\n"
        )


def test_hostile_trees_are_refused_and_no_failure(shells: Shells) -> None:
    with shells.open(disk_bytes=8 << 20) as shell:
        code = "import os\nfor _ in range(900): os.mkdir('d'); os.chdir('d')"
        shell.output(f'mkdir /deep; cd /deep; python3 -c "{code}"')
        with pytest.raises(SandboxFilesError, match="more than 200 nested directories"):
            shell.wait_for(shells.pool.snapshot(shell.sandbox))
    with shells.open(disk_bytes=8 << 20) as shell:
        shell.output("for i in 1 2 3; do truncate -s 7M /sparse$i; done")
        with pytest.raises(SandboxFilesError, match="limit of size or number"):
            shell.wait_for(shells.pool.snapshot(shell.sandbox))
        assert shell.output("echo works") == "works\n"


def test_names_of_whiteouts_do_not_delete_files(shells: Shells) -> None:
    with shells.open() as shell:
        shell.output("touch /etc/.wh.passwd '/.wh...' /etc/.wh..wh..opq")
        layer = shell.wait_for(shells.pool.snapshot(shell.sandbox))
    with shells.open(shells.image.with_layer(layer)) as fork:
        assert fork.output("head -c 4 /etc/passwd") == "root"
    shells.pool.store.delete_snapshot(layer)


@pytest.mark.parametrize(
    "command",
    [
        "rm -rf / --no-preserve-root",
        "chmod 000 /",
        "rm /usr/bin/bash",
        "echo x > /b; chmod +x /b; mv /b /usr/bin/bash",
    ],
)
def test_destroyed_root_is_a_failing_command(command: str, shells: Shells) -> None:
    with shells.open() as shell:
        shell.run(command)
        for persistent in (False, True):
            result = shell.run("echo $((40 + 2))", persistent=persistent, seconds=5)
            assert result.exit_code != 0 and "42" not in result.output


def test_sandboxes_do_not_share_files_or_processes(shells: Shells) -> None:
    with shells.open() as one, shells.open() as other:
        one.run("echo x > /x; (setsid sleep 600 >/dev/null 2>&1 &)")
        assert other.run("ls /x; pgrep sleep; kill -9 -1").exit_code != 0
        assert one.output("cat /x; set -- /proc/[0-9]*; echo $#") == "x\n3\n"


def test_image_sets_environment_and_directory(shells: Shells) -> None:
    pool = shells.pool
    opening = pool.open(shells.image, environment={"COLOR": "red"}, working_directory="/etc")
    sandbox = shells.wait_for(opening)
    result = shells.wait_for(sandbox.run("echo $COLOR $SIZE $PWD", environment={"SIZE": "5"}))
    shells.wait_for(sandbox.close())
    assert result.output == "red 5 /etc\n"


def test_close_ends_a_running_call_of_another_task(shells: Shells) -> None:
    async def close() -> None:
        sandbox = await shells.pool.open(shells.image)
        running = asyncio.create_task(sandbox.run("sleep 600"))
        await asyncio.sleep(0.2)
        await sandbox.close()
        with pytest.raises(SandboxError, match="exited"):
            await running

    shells.wait_for(close())


def test_cancelled_command_closes_its_sandbox(shells: Shells) -> None:
    async def cancel() -> None:
        sandbox = await shells.pool.open(shells.image)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await sandbox.run("sleep 600")
        # The next answer would be that of the interrupted call.
        with pytest.raises(SandboxError, match="closed") as error:
            await sandbox.run("echo x")
        assert error.value.failure_source == "closed"

    shells.wait_for(cancel())


def test_opening_waits_for_a_free_place(image_store, request) -> None:  # type: ignore[no-untyped-def]
    shells = Shells(image_store, max_sandboxes=1)
    request.addfinalizer(shells.close)

    async def wait() -> bool:
        first = await shells.pool.open(shells.image)
        second = asyncio.create_task(shells.pool.open(shells.image))
        await asyncio.sleep(0.2)
        waited = not second.done()
        await first.close()
        await (await second).close()
        return waited

    assert shells.wait_for(wait())


def test_host_image_has_the_usual_programs(shells: Shells) -> None:
    image = shells.wait_for(shells.pool.load(HOST_IMAGE))
    with shells.open(image) as shell:
        command = "printf 'b\\na\\n' | sort | sed s/a/c/ | grep -n c; find /etc -name passwd; python3 -c 1"
        result = shell.run(command)
    assert result.output.startswith("1:c\n/etc/passwd\n")
    assert "python3: command not found" in result.output
