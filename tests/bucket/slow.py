"""A slow way to a server on this machine: python -m tests.bucket.slow PORT [MS] [MB_PER_SECOND]

Prints its own port. What a client sends arrives MS later; all that the server sends shares MB_PER_SECOND.
"""

import asyncio
import sys
import time


async def main(port: int, seconds: float, rate: float) -> None:
    free_at = 0.0

    async def paid(n_bytes: int) -> None:
        nonlocal free_at
        free_at = max(free_at, time.monotonic()) + n_bytes / rate
        await asyncio.sleep(free_at - time.monotonic())

    async def copied(source: asyncio.StreamReader, target: asyncio.StreamWriter, is_request: bool) -> None:
        try:
            while data := await source.read(1 << 16):
                await (asyncio.sleep(seconds) if is_request else paid(len(data)))
                target.write(data)
                await target.drain()
        except OSError:
            pass
        finally:
            target.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(copied(reader, there[1], True), copied(there[0], writer, False))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    numbers = [float(word) for word in sys.argv[1:]]
    port, milliseconds, megabytes = (*numbers, *(50, 20)[len(numbers) - 1 :])
    asyncio.run(main(int(port), milliseconds / 1000, megabytes * 1e6))
