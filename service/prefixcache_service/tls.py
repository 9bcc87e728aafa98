"""TLS on both ports, and what must be so before anybody beyond this machine can connect.

Owns which files are read, and when. Knows nothing of tenants.
"""

import ipaddress
import ssl
import threading
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

    def context(self) -> ssl.SSLContext:
        """What a port of HTTP needs of them. Raises ConfigurationError where they are no good."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.num_tickets = 0  # nobody resumes what a certificate of another day has opened
        try:
            context.load_cert_chain(self.certificate, self.key, password=_no_password)
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"--tls-cert {self.certificate} and --tls-key {self.key}: {error}"
            ) from None
        if self.client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            try:
                context.load_verify_locations(self.client_ca)
            except (OSError, ValueError) as error:
                raise ConfigurationError(f"--tls-client-ca {self.client_ca}: {error}") from None
        return context

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        """What a port of gRPC needs of them."""
        return grpc.ssl_server_certificate_configuration(
            [(self.key.read_bytes(), self.certificate.read_bytes())],
            root_certificates=None if self.client_ca is None else self.client_ca.read_bytes(),
        )

    def stamp(self) -> object:
        """Changes whenever one of the files does."""
        try:
            found = [path.stat() for path in (self.certificate, self.key, self.client_ca) if path]
        except OSError:
            return None
        return [(status.st_mtime_ns, status.st_size, status.st_ino) for status in found]


class Certificates:
    """The files, as they were when they were last in order.

    They are looked at whenever somebody connects, so that a change holds for all connections from
    then on. Files that cannot be used change nothing: the log has one line for each such change.
    Raises ConfigurationError where they cannot be used at the start.
    """

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._lock = threading.Lock()  # gRPC asks on threads of its own
        self._seen = files.stamp()
        self._context = files.context()
        self._configuration = self._given = files.configuration()

    def credentials(self) -> grpc.ServerCredentials:
        """For a port of gRPC."""
        return grpc.dynamic_ssl_server_credentials(
            self._given,
            self._for_a_connection,  # type: ignore[arg-type]  # None: nothing has changed
            require_client_authentication=self._files.client_ca is not None,
        )

    def context(self) -> ssl.SSLContext:
        """For a port of HTTP: each of its connections gets the files of its moment."""
        context = self._files.context()
        context.sni_callback = self._at_hello
        return context

    def _at_hello(self, connection: ssl.SSLObject, *_: object) -> None:
        with self._lock:
            self._refresh()
            connection.context = self._context

    def _for_a_connection(self) -> grpc.ServerCertificateConfiguration | None:
        """What gRPC is to use from now on; None where that is what it has."""
        with self._lock:
            self._refresh()
            if self._given is self._configuration:
                return None
            self._given = self._configuration
            return self._given

    def _refresh(self) -> None:
        stamp = self._files.stamp()
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            self._context, self._configuration = self._files.context(), self._files.configuration()
        except (ConfigurationError, OSError) as error:
            log.error("tls_files", reason=str(error), kept="the certificates read before")
        else:
            log.info("tls_files", read="anew")


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
