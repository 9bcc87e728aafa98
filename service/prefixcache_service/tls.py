"""TLS on both ports, and what must be so before anybody beyond this machine can connect.

Owns which files are read, once, at start. Knows nothing of tenants.
"""

import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from prefixcache.errors import ConfigurationError
from prefixcache_service import log


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: the server's certificate chain, its key, and who signs certificates of clients.

    With client_ca every connection on either port needs a certificate that it has signed.
    """

    certificate: Path
    key: Path
    client_ca: Path | None = None

    def check(self) -> None:
        """Raise ConfigurationError where the files cannot be used."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.certificate, self.key, password=_no_password)
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"--tls-cert {self.certificate} and --tls-key {self.key}: {error}"
            ) from None
        if self.client_ca is not None:
            try:
                context.load_verify_locations(self.client_ca)
            except (OSError, ValueError) as error:
                raise ConfigurationError(f"--tls-client-ca {self.client_ca}: {error}") from None

    def credentials(self) -> grpc.ServerCredentials:
        """For a port of gRPC."""
        return grpc.ssl_server_credentials(
            [(self.key.read_bytes(), self.certificate.read_bytes())],
            root_certificates=None if self.client_ca is None else self.client_ca.read_bytes(),
            require_client_auth=self.client_ca is not None,
        )


def _no_password() -> bytes:
    raise ValueError("the key is encrypted; give one that is not")


def check_exposure(
    host: str, host_flag: str, *, tls: TlsFiles | None, tokens: bool, allow_insecure: bool
) -> None:
    """Refuse a port that strangers could reach, unless that was asked for, and then warn.

    Beyond loopback it takes TLS, and tokens or certificates of clients. Raises ConfigurationError.
    """
    known = tokens or (tls is not None and tls.client_ca is not None)
    if _is_loopback(host) or (tls is not None and known):
        return
    lacks = "tokens or certificates of clients (--tokens, --tls-client-ca)" if not known else ""
    if tls is None:
        lacks = " and ".join(filter(None, ["TLS (--tls-cert, --tls-key)", lacks]))
    if not allow_insecure:
        raise ConfigurationError(
            f"{host_flag} {host} can be reached from other machines, and there is no {lacks}; "
            "add them, listen on 127.0.0.1, or accept that with --allow-insecure"
        )
    log.warning("insecure", host=host, lacks=lacks)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
