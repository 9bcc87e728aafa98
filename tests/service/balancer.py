"""A plain load balancer: it knows connections and bytes, and nothing of gRPC."""

import asyncio
import threading
from collections import deque


class Balancer:
    """Each new connection goes to the next of the ports that takes it."""

    def __init__(self, *ports):
        self._ports = deque(ports)
        self._writers = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._server = self._call(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.target = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    def cut(self):
        """End all connections; those that come then go to the next port."""
        self._call(self._cut())

    def _call(self, work):
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _cut(self):
        for writer in self._writers:
            writer.transport.abort()

    async def _close(self):
        self._server.close()
        await self._cut()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.wait(others, timeout=5) if others else None

    async def _serve(self, reader, writer):
        there = await self._connect()
        if there is None:
            writer.transport.abort()
            return
        await asyncio.gather(self._pump(reader, there[1]), self._pump(there[0], writer))

    async def _connect(self):
        for _ in range(len(self._ports)):
            port = self._ports[0]
            self._ports.rotate(-1)
            try:
                return await asyncio.open_connection("127.0.0.1", port)
            except ConnectionRefusedError:
                continue
        return None

    async def _pump(self, reader, writer):
        self._writers.add(writer)
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            self._writers.discard(writer)
            writer.transport.abort()
