"""System-call filter of both architectures, run by a small interpreter of classic BPF."""

from __future__ import annotations

import errno
import struct

import pytest

from rl_loop.sandbox import SandboxUnavailableError
from rl_loop.sandbox.seccomp import (
    ARGUMENT_RULES,
    NEWEST_SYSCALL,
    PYTHON_POLICY,
    SHELL_ARGUMENT_RULES,
    SHELL_CALLS,
    SHELL_POLICY,
    ArgumentRule,
    SyscallPolicy,
    seccomp_filter,
)

ALLOW, KILL = 0x7FFF0000, 0x80000000
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def refuse(number: int) -> int:
    return 0x00050000 | number


def run_filter(program: bytes, architecture: int, number: int, *arguments: int) -> int:
    """Return the action of the kernel for a system call, as a SECCOMP_RET_* value."""
    padded = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("<IIQ6Q", number, architecture, 0, *padded)
    instructions = list(struct.iter_unpack("<HBBI", program))
    accumulator = position = 0
    while True:
        code, if_true, if_false, constant = instructions[position]
        position += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, constant)
        elif code == 0x54:
            accumulator &= constant
        elif code == 0x06:
            return constant
        elif code == 0x05:
            position += constant
        else:
            taken = {0x15: accumulator == constant, 0x35: accumulator >= constant}[code]
            position += if_true if taken else if_false


@pytest.mark.parametrize(("machine", "column"), [("x86_64", 0), ("aarch64", 1)])
@pytest.mark.parametrize("policy", [PYTHON_POLICY, SHELL_POLICY], ids=["python", "shell"])
def test_only_listed_system_calls_are_denied(
    policy: SyscallPolicy, machine: str, column: int
) -> None:
    program = seccomp_filter(machine, policy)
    denied = {numbers[column] for numbers in policy.denied.values()} - {None}
    ignored = {numbers[column] for numbers in policy.ignored.values()}
    missing = {numbers[column] for numbers in policy.missing.values()} - {None}
    missing |= set(range(NEWEST_SYSCALL + 1, 500))
    judged = {rule.numbers[column] for rule in policy.rules.values()}
    assert len(denied | ignored | missing) == len(denied) + len(ignored) + len(missing)
    assert not (denied | ignored | missing) & judged
    for number in range(500):
        if number not in judged:
            expected = (
                refuse(errno.EPERM)
                if number in denied
                else refuse(0)
                if number in ignored
                else refuse(errno.ENOSYS)
                if number in missing
                else ALLOW
            )
            assert run_filter(program, AUDIT[machine], number) == expected, number


@pytest.mark.parametrize(("machine", "column"), [("x86_64", 0), ("aarch64", 1)])
@pytest.mark.parametrize(
    ("policy", "rule"),
    [
        *(pytest.param(PYTHON_POLICY, rule, id=name) for name, rule in ARGUMENT_RULES.items()),
        *(pytest.param(SHELL_POLICY, r, id=f"shell: {n}") for n, r in SHELL_ARGUMENT_RULES.items()),
    ],
)
def test_argument_rules_deny_only_the_named_values(
    policy: SyscallPolicy, rule: ArgumentRule, machine: str, column: int
) -> None:
    program = seccomp_filter(machine, policy)
    for value in range(0, 2048):
        hit = any(
            value & wanted == wanted if rule.bits else value == wanted for wanted in rule.values
        )
        arguments = [0xFFFF_FFFF] * rule.argument + [value]
        expected = refuse(rule.error) if hit != rule.others else ALLOW
        assert run_filter(program, AUDIT[machine], rule.numbers[column], *arguments) == expected, (
            value
        )


def test_shell_calls_are_the_difference_of_the_policies() -> None:
    assert set(PYTHON_POLICY.denied) - set(SHELL_POLICY.denied) == SHELL_CALLS
    assert {"setsid", "ptrace", "flock"} <= SHELL_CALLS
    assert {"mount", "unshare", "bpf", "memfd_create"} <= set(SHELL_POLICY.denied)


def test_only_shared_anonymous_and_huge_mappings_are_denied() -> None:
    program, mmap = seccomp_filter("x86_64"), 9
    private, shared, anonymous, stack, huge = 0x02, 0x01, 0x20, 0x20000, 0x40000
    assert run_filter(program, AUDIT["x86_64"], mmap, 0, 4096, 3, shared | anonymous) == refuse(
        errno.EPERM
    )
    assert run_filter(
        program, AUDIT["x86_64"], mmap, 0, 4096, 3, private | anonymous | huge
    ) == refuse(errno.EPERM)
    for flags in (private | anonymous, private, shared, private | anonymous | stack):
        assert run_filter(program, AUDIT["x86_64"], mmap, 0, 4096, 3, flags) == ALLOW


@pytest.mark.parametrize(
    ("machine", "clone", "socket"), [("x86_64", 56, 41), ("aarch64", 220, 198)]
)
def test_clone_and_socket_are_filtered_by_their_first_argument(
    machine: str, clone: int, socket: int
) -> None:
    program, architecture = seccomp_filter(machine), AUDIT[machine]
    thread, new_user, new_network = 0x003D0F00, 0x10000000, 0x40000000
    assert run_filter(program, architecture, clone, thread) == ALLOW
    assert run_filter(program, architecture, clone, new_user | 17) == refuse(errno.EPERM)
    assert run_filter(program, architecture, clone, new_network) == refuse(errno.EPERM)
    assert run_filter(program, architecture, 435) == refuse(errno.ENOSYS)
    unix, internet, netlink, virtual_machine = 1, 2, 16, 40
    for call in (socket, socket + 12 if machine == "x86_64" else socket + 1):
        assert run_filter(program, architecture, call, unix) == ALLOW
        for family in (internet, netlink, virtual_machine):
            assert run_filter(program, architecture, call, family) == refuse(errno.EACCES)


def test_calls_of_another_architecture_kill_the_process() -> None:
    i386 = 0x40000003
    assert run_filter(seccomp_filter("x86_64"), i386, 0) == KILL
    assert run_filter(seccomp_filter("aarch64"), AUDIT["x86_64"], 0) == KILL
    x32_read = 0x40000000
    assert run_filter(seccomp_filter("x86_64"), AUDIT["x86_64"], x32_read) == KILL


def test_unknown_architecture_is_rejected_by_name() -> None:
    with pytest.raises(SandboxUnavailableError, match="'riscv64'"):
        seccomp_filter("riscv64")
