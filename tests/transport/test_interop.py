"""Peers that do not have the plugin: a client generated from the .proto, and grpc.aio on either side."""

from __future__ import annotations

import asyncio
import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from google.protobuf import descriptor_pool, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from ray_serve_grpc import _native
from ray_serve_grpc.bridge import bridge_for

from .endpoints import PATIENCE, admission, echo, endpoints, message, status, written
from .stock import StockServer, call_stock, field, fields_of

PROTOS = Path(__file__).parents[2] / "protos"
SERVICE = "ray_serve_grpc.v1.InterDeploymentService"
MIB = 1 << 20


@pytest.fixture(scope="module")
def wire(tmp_path_factory):
    """What protoc makes of protos/inter_deployment.proto."""
    from grpc_tools import protoc

    folder = tmp_path_factory.mktemp("generated")
    out = [f"--python_out={folder}", f"--grpc_python_out={folder}"]
    assert protoc.main(["protoc", f"-I{PROTOS}", *out, "inter_deployment.proto"]) == 0
    sys.path.insert(0, str(folder))
    try:
        messages = importlib.import_module("inter_deployment_pb2")
        service = importlib.import_module("inter_deployment_pb2_grpc")
    finally:
        sys.path.remove(str(folder))
    return SimpleNamespace(messages=messages, stub=service.InterDeploymentServiceStub)


def channel_to(ends, *options):
    return grpc.aio.insecure_channel(f"127.0.0.1:{ends.server.port}", options=options)


# A client generated from the .proto.


async def test_a_generated_client_shakes_hands(wire, tmp_path):
    async with endpoints(echo, "tcp", tmp_path, identity="abc", version="9.9", max_message_size=MIB) as ends:
        async with channel_to(ends) as channel:
            hello = wire.messages.HandshakeRequest(version="7", capabilities=["unheard of"])
            answer = await wire.stub(channel).Handshake(hello, timeout=PATIENCE)
    assert (answer.version, answer.identity, answer.max_message_size) == ("9.9", "abc", MIB)
    assert "unheard of" not in answer.capabilities


async def test_a_generated_client_calls(wire, tmp_path):
    seen = []

    async def handler(call):
        seen.append((call.metadata[:3], call.extra, bytes(call.body), [bytes(b) for b in call.buffers]))
        await echo(call)

    async with endpoints(handler, "tcp", tmp_path) as ends, channel_to(ends) as channel:
        metadata = wire.messages.RequestMetadata(request_id="id", call_method="méthode", extra=b"extra")
        request = wire.messages.CallRequest(metadata=metadata, body=b"body", buffers=[b"b" * 10, b"", b"c" * 100_000])
        call = wire.stub(channel).HandleRequestWithRejection(request, timeout=PATIENCE)
        answer = await call
        headers = dict(await call.initial_metadata())
    assert seen == [(("id", "", "méthode"), b"extra", b"body", [b"b" * 10, b"", b"c" * 100_000])]
    assert (answer.kind, answer.body, list(answer.buffers)) == (0, b"body", [b"b" * 10, b"", b"c" * 100_000])
    assert (headers["accepted"], headers["num_ongoing_requests"]) == ("1", "1")


async def test_a_generated_client_reads_a_stream_and_its_admission_first(wire, tmp_path):
    go_on = asyncio.Event()

    async def handler(call):
        call.admit(True, 2)
        await go_on.wait()
        for n in range(1000):
            if not call.send(n % 4, b"%d" % n):
                await written(call)
        call.finish()

    async with endpoints(handler, "tcp", tmp_path) as ends, channel_to(ends) as channel:
        call = wire.stub(channel).HandleRequestStreaming(wire.messages.CallRequest(), timeout=PATIENCE)
        assert dict(await call.initial_metadata())["num_ongoing_requests"] == "2"
        go_on.set()
        assert [(item.kind, item.body) async for item in call] == [(n % 4, b"%d" % n) for n in range(1000)]


async def test_a_generated_client_sees_a_refusal_in_the_headers(wire, tmp_path):
    seen = asyncio.Event()

    async def handler(call):
        call.admit(False, 5)
        # grpc.aio loses the headers of a stream whose end comes before it has asked for them.
        await seen.wait()
        call.finish()

    async with endpoints(handler, "tcp", tmp_path) as ends, channel_to(ends) as channel:
        call = wire.stub(channel).HandleRequestWithRejectionStreaming(wire.messages.CallRequest(), timeout=PATIENCE)
        assert dict(await call.initial_metadata())["accepted"] == "0"
        seen.set()
        assert [item async for item in call] == []
        assert await call.code() == grpc.StatusCode.OK


async def test_a_generated_client_that_cancels_is_heard(wire, tmp_path):
    begun, told = asyncio.Event(), asyncio.Event()

    async def handler(call):
        call.watch_cancel(bridge_for(asyncio.get_running_loop()), told.set)
        begun.set()
        await told.wait()

    async with endpoints(handler, "tcp", tmp_path) as ends, channel_to(ends) as channel:
        call = wire.stub(channel).HandleRequest(wire.messages.CallRequest())
        waiting = asyncio.ensure_future(call.code())
        await asyncio.wait_for(begun.wait(), PATIENCE)
        call.cancel()
        await asyncio.wait_for(told.wait(), PATIENCE)
        assert await waiting == grpc.StatusCode.CANCELLED


@pytest.mark.parametrize(
    ("token", "size", "code"),
    [
        ("Bearer secret", 10, grpc.StatusCode.OK),
        ("Bearer secret", 2 * MIB, grpc.StatusCode.RESOURCE_EXHAUSTED),
        ("Bearer wrong", 2 * MIB, grpc.StatusCode.UNAUTHENTICATED),
        (None, 10, grpc.StatusCode.UNAUTHENTICATED),
    ],
)
async def test_a_generated_client_gets_the_statuses_of_the_proto(wire, tmp_path, token, size, code):
    options = {"authorization": "Bearer secret", "max_message_size": MIB}
    async with endpoints(echo, "tcp", tmp_path, **options) as ends, channel_to(ends) as channel:
        metadata = (("authorization", token),) if token else ()
        request = wire.messages.CallRequest(body=b"x" * size)
        call = wire.stub(channel).HandleRequest(request, metadata=metadata, timeout=PATIENCE)
        assert await call.code() == code
        assert "secret" not in (await call.details() or "")


async def test_what_is_not_served_is_unimplemented(tmp_path):
    async with endpoints(echo, "tcp", tmp_path) as ends, channel_to(ends) as channel:
        for path in (f"/{SERVICE}/NoSuchMethod", "/no.such.Service/Method", "/ray.serve.ASGIService/Other"):
            assert await channel.unary_unary(path)(b"", timeout=PATIENCE).code() == grpc.StatusCode.UNIMPLEMENTED


async def test_a_compressed_request_is_refused_with_a_status(wire, tmp_path):
    async with endpoints(echo, "tcp", tmp_path) as ends, channel_to(ends) as channel:
        request = wire.messages.CallRequest(body=b"x" * 10_000)
        call = wire.stub(channel).HandleRequest(request, compression=grpc.Compression.Gzip, timeout=PATIENCE)
        assert await call.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_the_health_of_the_port_can_be_asked(tmp_path):
    async with endpoints(echo, "tcp", tmp_path, authorization="Bearer secret") as ends, channel_to(ends) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        metadata = (("authorization", "Bearer secret"),)
        answer = await stub.Check(health_pb2.HealthCheckRequest(), metadata=metadata, timeout=PATIENCE)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        unknown = stub.Check(health_pb2.HealthCheckRequest(service="x"), metadata=metadata, timeout=PATIENCE)
        assert await unknown.code() == grpc.StatusCode.NOT_FOUND
        assert await stub.Check(health_pb2.HealthCheckRequest()).code() == grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_a_client_that_knows_nothing_asks_what_is_served_and_calls_it(version, tmp_path):
    """As grpcurl does: only the port's address and the token are given. Its protocol is the same in both versions."""

    def ask(target):
        name = f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"
        with grpc.insecure_channel(target) as channel:
            reflect = channel.stream_stream(
                name,
                request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
                response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
            )
            requests = [
                reflection_pb2.ServerReflectionRequest(list_services=""),
                reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE),
            ]
            metadata = (("authorization", "Bearer secret"),)
            services, described = list(reflect(iter(requests), metadata=metadata, timeout=PATIENCE))
            pool = descriptor_pool.DescriptorPool()
            for encoded in described.file_descriptor_response.file_descriptor_proto:
                pool.AddSerializedFile(encoded)
            call = pool.FindServiceByName(SERVICE).FindMethodByName("HandleRequest")
            request = message_factory.GetMessageClass(call.input_type)(body=b"found out")
            unary = channel.unary_unary(
                f"/{SERVICE}/{call.name}",
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=message_factory.GetMessageClass(call.output_type).FromString,
            )
            answer = unary(request, metadata=metadata, timeout=PATIENCE)
            return {service.name for service in services.list_services_response.service}, answer.body

    async with endpoints(echo, "tcp", tmp_path, authorization="Bearer secret", reflection=True) as ends:
        services, body = await asyncio.to_thread(ask, f"127.0.0.1:{ends.server.port}")
    assert {SERVICE, "grpc.health.v1.Health"} <= services
    assert body == b"found out"


@pytest.mark.parametrize(("reflection", "code"), [(False, "UNIMPLEMENTED"), (True, "UNAUTHENTICATED")])
async def test_reflection_is_off_unless_asked_for_and_asks_for_the_token(reflection, code, tmp_path):
    options = {"authorization": "Bearer secret"} if reflection else {}
    async with endpoints(echo, "tcp", tmp_path, reflection=reflection, **options) as ends, channel_to(ends) as channel:
        reflect = channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
        call = reflect(timeout=PATIENCE)
        assert await call.code() == grpc.StatusCode[code]


# Ray's own protocol by grpc.aio.


async def test_a_stock_caller_of_our_server(tmp_path):
    async def handler(call):
        assert (call.dialect, bytes(call.fields[0])) == (_native.DIALECT_STOCK, b"metadata")
        call.admit(True, 4)
        call.send(0, call.fields[1])
        call.finish()

    body = b"x" * (3 * MIB)
    async with endpoints(handler, "tcp", tmp_path) as ends:
        assert await call_stock(ends.server.port, body) == (body, False)
        assert await call_stock(ends.server.port, body, method="HandleRequestWithRejection") == (body, False)


async def test_our_caller_of_a_stock_server():
    async with StockServer() as server:
        channel = _native.Channel([f"tcp:127.0.0.1:{server.port}"])
        for method, answers in [
            (_native.METHOD_UNARY, [b"abc"]),
            (_native.METHOD_UNARY_REJECTION, [b"abc"]),
            (_native.METHOD_STREAMING, [b"a", b"b", b"c"]),
            (_native.METHOD_STREAMING_REJECTION, [b"a", b"b", b"c"]),
        ]:
            call = channel.call_stock(method, (b"metadata", b"abc", b""))
            assert await admission(call) == ((True, 3) if method >= _native.METHOD_UNARY_REJECTION else None)
            received = []
            while (taken := await message(call)) is not None:
                received.append(bytes(taken[1]))
            assert (received, call.status()) == (answers, (_native.STATUS_OK, ""))
        assert channel.dialect() == _native.DIALECT_STOCK


async def test_thirty_mebibytes_to_a_stock_server_that_takes_them():
    async with StockServer() as server:
        channel = _native.Channel([f"tcp:127.0.0.1:{server.port}"])
        body = bytes(range(256)) * (30 * MIB // 256)
        # grpc's own default limit is 4 MiB.
        code, text = await status(channel.call_stock(_native.METHOD_UNARY, (b"", body, b"")))
        assert code == _native.STATUS_RESOURCE_EXHAUSTED
        assert "larger than max" in text
    async with StockServer(options=(("grpc.max_receive_message_length", -1),)) as server:
        channel = _native.Channel([f"tcp:127.0.0.1:{server.port}"])
        assert bytes((await message(channel.call_stock(_native.METHOD_UNARY, (b"", body, b""))))[1]) == body


async def test_a_native_call_to_a_stock_server_fails_once_and_clearly():
    async with StockServer() as server:
        channel = _native.Channel([f"tcp:127.0.0.1:{server.port}"])
        call = channel.call(_native.METHOD_UNARY, (), b"", b"", ())
        code, _ = await status(call)
        assert (code, call.sent, server.calls) == (_native.STATUS_UNAVAILABLE, False, [])
        assert channel.dialect() == _native.DIALECT_STOCK


async def test_a_stock_server_that_stops_fails_what_it_had_begun():
    async with StockServer(hold=True) as server:
        channel = _native.Channel([f"tcp:127.0.0.1:{server.port}"])
        call = channel.call_stock(_native.METHOD_UNARY, (b"", b"x", b""))
        await asyncio.wait_for(server.begun.wait(), PATIENCE)
        await server.server.stop(0)
        code, _ = await status(call)
        assert (code in (_native.STATUS_UNAVAILABLE, _native.STATUS_CANCELLED), call.sent) == (True, True)


# Golden bytes: what version 1 looks like on the wire, whatever is rewritten.

GOLDEN_REQUEST = bytes.fromhex(
    "0a14" "0a026964" "1a046e616d65" "32036d6f64" "7a03657874"  # metadata: request_id, call_method, …, extra
    "1204" "626f6479"  # body
    "7a20" + 32 * "00" +  # padding up to 64
    "1a05" "6669727374"  # the first buffer
)  # fmt: skip
GOLDEN_RESPONSE = bytes.fromhex("080212056572726f72")  # kind ERROR, body
UNKNOWN_FIELDS = bytes.fromhex("a00601a20603666f6fa9060102030405060708ad0601020304")  # fields 100 and up


async def test_a_request_has_the_bytes_of_version_1():
    async with Recorder() as recorder:
        channel = _native.Channel([f"tcp:127.0.0.1:{recorder.port}"], identity="me")
        strings = ("id", "", "name", "", "", "mod")
        call = channel.call(_native.METHOD_UNARY, strings, b"ext", b"body", (b"first",))
        assert (await message(call))[:2] == (2, b"error")
        assert recorder.requests["HandleRequest"] == GOLDEN_REQUEST
        assert len(GOLDEN_REQUEST) - len(b"first") == 64  # aligned
        # 1: version, 2: capabilities.
        assert fields_of(recorder.requests["Handshake"])[1] == _native.__version__.encode()


async def test_a_response_has_the_bytes_of_version_1(tmp_path):
    async def handler(call):
        assert (call.metadata[:6], call.extra) == (("id", "", "name", "", "", "mod"), b"ext")
        assert (call.body, [bytes(buffer) for buffer in call.buffers]) == (b"body", [b"first"])
        call.send(_native.KIND_ERROR, b"error")
        call.finish()

    async with endpoints(handler, "tcp", tmp_path) as ends, channel_to(ends) as channel:
        for unknown in (b"", UNKNOWN_FIELDS):
            call = channel.unary_unary(f"/{SERVICE}/HandleRequest")
            assert await call(GOLDEN_REQUEST + unknown, timeout=PATIENCE) == GOLDEN_RESPONSE


async def test_a_newer_server_is_understood():
    """Its Handshake and its responses have fields, and capabilities, that this version does not know."""
    async with Recorder(unknown=UNKNOWN_FIELDS, capabilities=[b"telepathy"]) as recorder:
        channel = _native.Channel([f"tcp:127.0.0.1:{recorder.port}"], identity="me")
        call = channel.call(_native.METHOD_UNARY, (), b"", b"", ())
        assert (await message(call))[:2] == (2, b"error")
        assert channel.dialect() == _native.DIALECT_NATIVE


async def test_the_golden_bytes_are_what_the_proto_says(wire):
    request = wire.messages.CallRequest.FromString(GOLDEN_REQUEST)
    metadata = request.metadata
    assert (metadata.request_id, metadata.call_method, metadata.multiplexed_model_id) == ("id", "name", "mod")
    assert (metadata.extra, request.body, list(request.buffers)) == (b"ext", b"body", [b"first"])
    response = wire.messages.CallResponse.FromString(GOLDEN_RESPONSE)
    assert (response.kind, response.body) == (wire.messages.CallResponse.ERROR, b"error")


class Recorder:
    """A server of the native service by grpc.aio that keeps the bytes it is sent."""

    def __init__(self, *, unknown: bytes = b"", capabilities: tuple[bytes, ...] | list[bytes] = ()) -> None:
        self.requests: dict[str, bytes] = {}
        handshake = field(1, b"8.8") + b"".join(field(2, name) for name in capabilities) + field(3, b"me")
        self.answers = {"Handshake": handshake + unknown, "HandleRequest": GOLDEN_RESPONSE + unknown}

    async def __aenter__(self) -> Recorder:
        def handler(name):
            async def handle(body, context):
                self.requests[name] = body
                return self.answers[name]

            return grpc.unary_unary_rpc_method_handler(handle)

        self.server = grpc.aio.server()
        handlers = {name: handler(name) for name in self.answers}
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        await self.server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.stop(0)
