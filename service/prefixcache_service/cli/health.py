"""`prefixcache health`: whether a server serves, for whatever supervises it."""

from typing import Annotated

import grpc
import typer
from grpc_health.v1 import health_pb2, health_pb2_grpc

from prefixcache.errors import Unavailable
from prefixcache_service.channel import connector
from prefixcache_service.cli.client import Ca, Certificate, Server
from prefixcache_service.cli.config import ConfigFile, flag
from prefixcache_service.limits import DEFAULT_TARGET, target_of
from prefixcache_service.status import error_from_call


def health(
    timeout: Annotated[float, flag("Seconds to wait for an answer.", min=0.1)] = 5.0,
    server: Server = DEFAULT_TARGET,
    ca: Ca = "",
    certificate: Certificate = "",
    config: ConfigFile = None,
) -> None:
    """Ask a server by grpc.health.v1 whether it serves. Exit code 0 if so, else 1. Needs no token.

    \b
      prefixcache health
      prefixcache health --server replica-0.example:50051 --ca ca.pem
    """
    with connector(grpc, ca, certificate)(target_of(server)) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout)
        except grpc.RpcError as error:
            raise error_from_call(error) from None
    state = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        raise Unavailable(f"{server} is {state}: it loads its model, is stopping, or is broken")
    typer.echo(state)
