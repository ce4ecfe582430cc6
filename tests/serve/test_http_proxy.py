"""Requests over HTTP: the proxy is a caller like any other, and it hands bodies on as they are.

Annotations are not deferred here: FastAPI looks them up in the copy of the app that Serve makes.
"""

import asyncio
import concurrent.futures
import http.client
import json
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI, Request, WebSocket, WebSocketDisconnect
from harness import Cluster, deployment, same_as_actor
from harness.board import note, passage
from harness.cluster import until
from ray import serve
from starlette.responses import PlainTextResponse, Response, StreamingResponse

PATH = "/test-http-proxy-web"
api = FastAPI()


@deployment
class Words:
    def upper(self, text: str) -> str:
        return text.upper()

    async def spell(self, text: str) -> AsyncIterator[str]:
        for letter in text:
            yield letter


@deployment(max_ongoing_requests=50)
@serve.ingress(api)
class Web:
    def __init__(self, words: Any) -> None:
        self._words = words

    @api.get("/json")
    async def json(self, name: str, request: Request) -> Any:
        return {"name": await self._words.upper.remote(name), "header": request.headers.get("x-own")}

    @api.post("/size")
    async def size(self, request: Request) -> Any:
        body = await request.body()
        return {"size": len(body), "ends": [body[:1].hex(), body[-1:].hex()]}

    @api.post("/echo")
    async def echo(self, request: Request) -> Response:
        return Response(await request.body(), media_type="application/octet-stream", headers={"x-reply": "yes"})

    @api.get("/status/{code}")
    async def status(self, code: int) -> Response:
        return PlainTextResponse("told", status_code=code)

    @api.get("/fail")
    async def fail(self) -> None:
        raise ValueError("secret words")

    @api.get("/spell")
    async def spell(self, text: str) -> StreamingResponse:
        letters = self._words.options(stream=True).spell.remote(text)
        return StreamingResponse(letters, media_type="text/plain")

    @api.get("/gated")
    async def gated(self, key: str) -> StreamingResponse:
        async def body() -> AsyncIterator[str]:
            yield "before "
            await passage(key)
            yield "after"

        return StreamingResponse(body(), media_type="text/plain")

    @api.get("/endless")
    async def endless(self, key: str) -> StreamingResponse:
        async def body() -> AsyncIterator[bytes]:
            try:
                while True:
                    yield b"x" * 1000
                    await asyncio.sleep(0.01)
            finally:
                await note(f"{key} closed")

        return StreamingResponse(body())

    @api.get("/hold")
    async def hold(self, key: str) -> str:
        try:
            await note(f"{key} running")
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await note(f"{key} cancelled")
            raise
        return "never"

    @api.get("/zeros/{size}")
    async def zeros(self, size: int) -> Response:
        return Response(bytes(size))

    @api.websocket("/chat")
    async def chat(self, socket: WebSocket) -> None:
        await socket.accept()
        try:
            while True:
                text = await socket.receive_text()
                if text == "bye":
                    await socket.close(code=4001, reason="bye")
                    return
                await socket.send_text(await self._words.upper.remote(text))
                await socket.send_bytes(text.encode())
        except WebSocketDisconnect as gone:
            await note(f"websocket {gone.code}")


def web() -> Any:
    return Web.bind(Words.bind())


@deployment
class Plain:
    async def __call__(self, request: Request) -> Any:
        kind = request.query_params["kind"]
        return {"text": "plain", "bytes": b"\x00\xff", "json": {"a": [1]}, "none": None, "number": 3}[kind]


def plain() -> Any:
    return Plain.bind()


class Client:
    """One HTTP connection to the cluster's proxy."""

    def __init__(self, cluster: Cluster, build: Any = web) -> None:
        cluster.app(build, route=True)
        self._connection = http.client.HTTPConnection(urlsplit(cluster.http).netloc, timeout=30)
        self._prefix = "/" + f"{build.__module__}-{build.__name__}".replace("_", "-")

    def request(self, method: str, path: str, body: bytes | None = None, **headers: str) -> http.client.HTTPResponse:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        self._connection.request(method, self._prefix + path, body=body, headers=names)
        return self._connection.getresponse()

    def get(self, path: str, **headers: str) -> tuple[int, bytes]:
        answer = self.request("GET", path, **headers)
        return answer.status, answer.read()

    def close(self) -> None:
        self._connection.close()


@same_as_actor(expect={"name": "RAY", "header": "mine"})
def test_a_request_comes_back_through_two_hops(cluster: Cluster) -> Any:
    status, body = Client(cluster).get("/json?name=ray", x_own="mine")
    return json.loads(body) if status == 200 else [status, body]


@same_as_actor(expect=[[200, b"plain"], [200, b"\x00\xff"], [200, b'{"a":[1]}'], [200, b""], [200, b"3"]])
def test_results_that_are_not_responses_are_rendered(cluster: Cluster) -> Any:
    client = Client(cluster, plain)
    return [list(client.get(f"/?kind={kind}")) for kind in ("text", "bytes", "json", "none", "number")]


@same_as_actor()
def test_statuses_headers_and_errors_are_as_on_the_actor_path(cluster: Cluster) -> Any:
    client = Client(cluster)
    seen: list[Any] = [client.get(f"/status/{code}") for code in (200, 201, 404, 418, 503)]
    seen += [client.get("/nowhere")[0], client.get("/fail")[0], client.get("/json")[0]]
    answer = client.request("POST", "/echo", b"body")
    seen += [answer.getheader("x-reply"), answer.getheader("content-type"), answer.read()]
    return seen


@same_as_actor(expect=[0, 1, 100_000, 5 << 20])
def test_bodies_travel_to_the_replica(cluster: Cluster) -> Any:
    client = Client(cluster)
    return [
        json.loads(client.request("POST", "/size", bytes(size)).read())["size"] for size in (0, 1, 100_000, 5 << 20)
    ]


@same_as_actor(expect=[0, 1, 100_000, 6 << 20, 30 << 20], stock=False)  # Ray's own gRPC path ends at 4 MiB
def test_bodies_travel_from_the_replica(cluster: Cluster) -> Any:
    client = Client(cluster)
    return [len(client.get(f"/zeros/{size}")[1]) for size in (0, 1, 100_000, 6 << 20, 30 << 20)]


@same_as_actor(expect=b"s,t,r,e,a,m")
def test_a_stream_of_another_deployment_streams_out(cluster: Cluster) -> Any:
    return Client(cluster).get("/spell?text=s,t,r,e,a,m")[1]


@same_as_actor(expect=[b"before ", b"after"])
def test_a_chunk_leaves_before_the_next_is_made(cluster: Cluster) -> Any:
    key = cluster.key()
    answer = Client(cluster).request("GET", f"/gated?key={key}")
    first = answer.read(7)
    cluster.board.open(key)
    return [first, answer.read()]


@same_as_actor(native_only=True, expect=1)  # on the actor path the cancel is lost now and then
def test_a_client_that_goes_away_cancels_its_request(cluster: Cluster) -> Any:
    key = cluster.key()
    client = Client(cluster)
    client._connection.request("GET", f"{client._prefix}/hold?key={key}")
    cluster.board.wait(f"{key} running")
    client.close()
    return len(cluster.board.wait(f"{key} cancelled"))


@same_as_actor(native_only=True, expect=[True, 1, 0])  # as above
def test_a_client_that_leaves_a_stream_stops_its_generator(cluster: Cluster) -> Any:
    key = cluster.key()
    client = Client(cluster)
    answer = client.request("GET", f"/endless?key={key}")
    whole = answer.read(5000) == b"x" * 5000
    answer.close()
    client.close()
    closed = len(cluster.board.wait(f"{key} closed"))
    until(lambda: cluster.ongoing("Web", web) == 0)
    return [whole, closed, cluster.ongoing("Web", web)]


@same_as_actor(expect=["HELLO", b"hello", "AGAIN", b"again", 4001])
def test_a_websocket_talks_both_ways_and_closes_with_its_code(cluster: Cluster) -> Any:
    from websockets.exceptions import ConnectionClosed
    from websockets.sync.client import connect

    cluster.app(web, route=True)
    with connect(f"{cluster.websocket}{PATH}/chat", proxy=None) as socket:
        seen: list[Any] = []
        for word in ("hello", "again"):
            socket.send(word)
            seen += [socket.recv(timeout=20), socket.recv(timeout=20)]
        socket.send("bye")
        try:
            socket.recv(timeout=20)
        except ConnectionClosed as closed:
            seen.append(closed.rcvd.code if closed.rcvd else None)
    return seen


@same_as_actor(expect=1)
def test_a_websocket_client_that_hangs_up_is_noticed(cluster: Cluster) -> Any:
    from websockets.sync.client import connect

    cluster.app(web, route=True)
    before = cluster.board.count("websocket 1001")
    with connect(f"{cluster.websocket}{PATH}/chat", proxy=None) as socket:
        socket.send("hello")
        socket.recv(timeout=20)
        socket.close(code=1001)
    return len(cluster.board.wait("websocket 1001", before + 1)) - before


@same_as_actor(expect=True)
def test_forty_requests_at_once_keep_their_bodies_apart(cluster: Cluster) -> Any:
    cluster.app(web, route=True)

    def call(number: int) -> bool:
        client = Client(cluster)
        body = str(number).encode() * 1000
        return client.request("POST", "/echo", body).read() == body

    with concurrent.futures.ThreadPoolExecutor(10) as threads:
        return all(threads.map(call, range(40)))


@same_as_actor(native_only=True, expect=True)
def test_the_proxys_calls_take_the_native_transport(cluster: Cluster) -> Any:
    """The proxy is the only caller of this ingress, so the served calls that its replica counts are the proxy's."""
    import ray

    cluster.app(plain, route=True)
    (replica,) = cluster.replica_actors("Plain", plain)

    def served(_self: Any) -> int:
        import ray_serve_grpc

        return sum(sum(kinds.values()) for kinds in ray_serve_grpc.status()["served"].values())

    before = ray.get(replica.__ray_call__.remote(served), timeout=20)
    client = Client(cluster, plain)
    for _ in range(5):
        client.get("/?kind=text")
    after = ray.get(replica.__ray_call__.remote(served), timeout=20)
    return after - before >= 5
