"""The two ways to reach a server under load: our own client, and OpenAI's completions over HTTP.

Both take prompts as token ids and note the arrival of each token by the same clock. The HTTP side
is a few lines over a plain connection: a client library would take a share of the cores that the
server needs.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks._load_mix import Call, Refused, Tokens
from benchmarks.peer_runners import environments
from prefixcache.errors import PrefixCacheError
from prefixcache_service import AsyncClient, Branch

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
KEEP_SECONDS = 30.0
START_SECONDS = 900.0  # it compiles when it starts


def _arrived(call: Call, count: int) -> None:
    now = asyncio.get_running_loop().time()
    call.first = call.first or now
    call.last = now
    call.tokens += count


class Ours:
    """A running `prefixcache serve`."""

    name = "ours"

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def generate(self, prompt: Tokens, max_tokens: int, call: Call) -> tuple[Tokens, str]:
        keep = KEEP_SECONDS if call.kind == "fork" else 0.0
        answer: Tokens = []
        try:
            stream = self._client.stream(prompt, max_tokens=max_tokens, keep_seconds=keep, **GREEDY)
            async for delta in stream:
                if delta.token_ids:
                    _arrived(call, len(delta.token_ids))
                    answer += delta.token_ids
            return answer, await stream.sequence_id()
        except PrefixCacheError as error:
            raise Refused(type(error).__name__) from error

    async def branch(
        self,
        before: Tokens,
        handle: str,
        ways: Sequence[Tokens],
        max_tokens: int,
        calls: list[Call],
    ) -> None:
        branches = [Branch(handle, token_ids=way) for way in ways]
        try:
            async for delta in self._client.stream_fork(branches, max_tokens=max_tokens, **GREEDY):
                if delta.token_ids:
                    _arrived(calls[delta.index], len(delta.token_ids))
        except PrefixCacheError as error:
            raise Refused(type(error).__name__) from error


class OpenAI:
    """A server that speaks OpenAI's /v1/completions, with vLLM's extensions for token ids."""

    def __init__(self, name: str, port: int, model: str) -> None:
        self.name = name
        self._port = port
        self._model = model

    async def generate(self, prompt: Tokens, max_tokens: int, call: Call) -> tuple[Tokens, str]:
        answer: Tokens = []
        async for token_ids in self._complete(prompt, max_tokens):
            _arrived(call, len(token_ids))
            answer += token_ids
        return answer, ""

    async def branch(
        self,
        before: Tokens,
        handle: str,
        ways: Sequence[Tokens],
        max_tokens: int,
        calls: list[Call],
    ) -> None:
        await asyncio.gather(
            *(
                self.generate(before + way, max_tokens, c)
                for way, c in zip(ways, calls, strict=True)
            )
        )

    async def _complete(self, prompt: Tokens, max_tokens: int) -> AsyncIterator[Tokens]:
        body = {"model": self._model, "prompt": prompt, "max_tokens": max_tokens, "stream": True}
        data = json.dumps({**body, **GREEDY, "return_token_ids": True}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 20)
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n"
        )
        writer.write(f"{head}Content-Type: application/json\r\nConnection: close\r\n\r\n".encode())
        writer.write(data)
        try:
            status = (await reader.readline()).split()[1:2]
            if status != [b"200"]:
                raise Refused(f"HTTP {b''.join(status).decode() or 'closed'}")
            async for line in reader:
                if line.startswith(b"data: {"):
                    (choice,) = json.loads(line[6:])["choices"]
                    if choice["token_ids"]:
                        yield choice["token_ids"]
        finally:
            writer.close()


@contextlib.contextmanager
def vllm(gguf: Path, log: Path) -> Iterator[OpenAI]:
    """vLLM's own server on the default model's weights; ended with all that it has started."""
    peer = environments.PEERS["vllm"]
    environments.build(peer)
    environments.safetensors(gguf)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = {
        "--model": str(environments.safetensors_directory(gguf)),
        "--served-model-name": "model",
        "--host": "127.0.0.1",
        "--port": str(port),
        "--dtype": "float32",
        "--max-model-len": "4096",
        "--max-num-seqs": "64",
    }
    line = [str(peer.python), "-m", "vllm.entrypoints.openai.api_server", "--enable-prefix-caching"]
    line += [word for pair in flags.items() for word in pair]
    with log.open("w") as errors:
        process = subprocess.Popen(
            line,
            stdout=errors,
            stderr=errors,
            env=environments.variables(peer),
            start_new_session=True,
        )
        try:
            _wait_until_healthy(process, port, log)
            yield OpenAI("vllm", port, "model")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_until_healthy(process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
            return
        time.sleep(1)
    raise RuntimeError(f"vLLM's server does not come up; see {log}")
