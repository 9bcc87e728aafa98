"""`prefixcache serve` in a process of its own."""

import os
import subprocess
import sys

COMMAND = ("-c", "from prefixcache_service.cli import main; main()")
FAULTY = ("-m", "tests.service.harness")  # the same, and its engine has an injection


class Process:
    """A server process; `port` is known once it is ready.

    log: where standard error goes. within: a command that runs the server's as its last arguments.
    It is killed where a `with` block is left before it has ended.
    """

    port = 0

    def __init__(self, *flags, program=COMMAND, log=subprocess.PIPE, within=(), **environment):
        self.popen = subprocess.Popen(
            [*within, sys.executable, *program, "serve", "--http-port", "0", *flags],
            stdin=subprocess.DEVNULL if program is COMMAND else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, **environment},
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.communicate()

    def ready(self):
        """The port, from the one line that is printed when it serves."""
        line = self.popen.stdout.readline()
        assert line.startswith("prefixcache is ready: gRPC 127.0.0.1:"), self.popen.communicate()
        self.port = int(line.split("127.0.0.1:")[1].split(",")[0])
        return self.port

    def end(self, seconds):
        """Exit code, rest of standard output, standard error."""
        try:
            out, err = self.popen.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            raise
        return self.popen.returncode, out, err
