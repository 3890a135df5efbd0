"""A program behind a pseudo-terminal: what a person would type, and what they would see.

    with PtySession([binary, "chat", "-m", model]) as session:
        session.expect("> ")
        session.send("Hello\\r")
        answer = session.expect("> ")        # everything up to and including it
"""
import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
import time

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class PtySession:
    def __init__(self, command, environment=None, columns=80, timeout=60):
        self.timeout = timeout
        self.raw = b""
        self.seen = 0
        self.status = None
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.environ.update(environment or {})
            os.execv(command[0], command)
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.status is None:
            try:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
            except OSError:
                pass
        os.close(self.fd)

    def text(self):
        """All output so far without escape sequences."""
        return ESCAPES.sub("", self.raw.decode("utf-8", "strict"))

    def _read(self, seconds):
        ready, _, _ = select.select([self.fd], [], [], seconds)
        if not ready:
            return False
        try:
            data = os.read(self.fd, 65536)
        except OSError:
            data = b""
        if not data:
            raise EOFError
        self.raw += data
        return True

    def send(self, text):
        os.write(self.fd, text.encode())

    def expect(self, pattern):
        """Waits for a regular expression in the output that no earlier call took."""
        deadline = time.monotonic() + self.timeout
        while True:
            plain = ESCAPES.sub("", self.raw.decode("utf-8", "ignore"))
            match = re.search(pattern, plain[self.seen:], re.S)
            if match:
                result = plain[self.seen:self.seen + match.end()]
                self.seen += match.end()
                return result
            left = deadline - time.monotonic()
            if left <= 0:
                raise AssertionError(f"no {pattern!r} in {plain[self.seen:]!r}")
            try:
                self._read(min(left, 1))
            except EOFError:
                raise AssertionError(f"ended before {pattern!r}: {plain[self.seen:]!r}") from None

    def wait(self):
        """The exit status, after the program has ended."""
        deadline = time.monotonic() + self.timeout
        while time.monotonic() < deadline:
            try:
                self._read(0.1)
            except EOFError:
                _, status = os.waitpid(self.pid, 0)
                self.status = os.waitstatus_to_exitcode(status)
                return self.status
        raise AssertionError("the program did not end")
