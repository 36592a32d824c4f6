"""Runs the local server of the tests."""

from tests.support.rl_loop.sglang_protocol import main

if __name__ == "__main__":
    main()
