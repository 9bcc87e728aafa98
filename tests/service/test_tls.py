"""TLS and mutual TLS on both ports, with certificates made here."""

import ssl

import httpx
import pytest
import trustme

from prefixcache.errors import ConfigurationError, InvalidArgument, Unauthenticated, Unavailable
from prefixcache_service.server import ServerConfig
from prefixcache_service.tenants import entry_for, fresh_token
from prefixcache_service.tls import TlsFiles
from tests.service.conftest import RunningServer

TOKEN = fresh_token()


@pytest.fixture(scope="module")
def pki(tmp_path_factory):
    """Paths of PEM files: a CA, a server of it, a gateway's certificate, and a stranger's."""
    folder = tmp_path_factory.mktemp("pki")
    ours, others = trustme.CA(), trustme.CA()
    server = ours.issue_cert("127.0.0.1")
    server.cert_chain_pems[0].write_to_path(folder / "server.pem")
    server.private_key_pem.write_to_path(folder / "server.key")
    gateway = ours.issue_cert("gateway.example")
    gateway.private_key_and_cert_chain_pem.write_to_path(folder / "gateway.pem")
    unnamed = ours.issue_cert("someone.example")
    unnamed.private_key_and_cert_chain_pem.write_to_path(folder / "unnamed.pem")
    stranger = others.issue_cert("gateway.example")
    stranger.private_key_and_cert_chain_pem.write_to_path(folder / "stranger.pem")
    ours.cert_pem.write_to_path(folder / "ca.pem")
    others.cert_pem.write_to_path(folder / "other-ca.pem")
    (folder / "tokens.toml").write_text(
        entry_for("operator", TOKEN) + 'admin = true\n[gate]\ncertificate = "gateway.example"\n'
    )
    return folder


def start(config, pki, *, client_ca=False, tokens=False):
    tls = TlsFiles(pki / "server.pem", pki / "server.key", pki / "ca.pem" if client_ca else None)
    return RunningServer(config, tls=tls, tokens=pki / "tokens.toml" if tokens else None).load()


def test_with_tls_nothing_goes_in_the_clear(tiny_config, pki):
    server = start(tiny_config, pki)
    try:
        with server.client(ca=pki / "ca.pem") as client:
            assert client.generate([5, 6, 7], max_tokens=2).outputs
        for settings in ({}, {"ca": pki / "other-ca.pem"}, {"ca": "system"}):
            with server.client(**settings) as client, pytest.raises(Unavailable):
                client.model_info()
        port = server.server.http_port
        known = ssl.create_default_context(cafile=pki / "ca.pem")
        assert httpx.get(f"https://127.0.0.1:{port}/metrics", verify=known).status_code == 200
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http://127.0.0.1:{port}/healthz")
    finally:
        server.close()


def test_mutual_tls_lets_in_whom_our_ca_signed_and_its_name_is_a_tenant(tiny_config, pki):
    server = start(tiny_config, pki, client_ca=True, tokens=True)
    ca = pki / "ca.pem"
    try:
        with server.client(ca=ca, certificate=pki / "gateway.pem", token="") as gate:
            kept = gate.generate([5, 6, 7], max_tokens=2, keep_seconds=60)
            assert [info.sequence_id for info in gate.sequences()] == [kept.sequence_id]
            assert gate.stats().requests_finished == 1
        with server.client(ca=ca, certificate=pki / "gateway.pem", token=TOKEN) as operator:
            assert operator.sequences() == ()
            assert operator.stats().blocks_total
        with server.client(ca=ca, certificate=pki / "unnamed.pem", token="") as unnamed:
            assert_raises(Unauthenticated, unnamed.model_info)
        for certificate in (None, pki / "stranger.pem"):
            with server.client(ca=ca, certificate=certificate, token=TOKEN) as stranger:
                assert_raises(Unavailable, stranger.model_info)
        context = ssl.create_default_context(cafile=ca)
        url = f"https://127.0.0.1:{server.server.http_port}/healthz"
        with pytest.raises(httpx.HTTPError):
            httpx.get(url, verify=context)
        context.load_cert_chain(pki / "gateway.pem")
        assert httpx.get(url, verify=context).status_code == 200
    finally:
        server.close()


class Authority:
    """A CA, and what it signs: written over the same files each time."""

    def __init__(self, folder):
        self._ca, self._folder = trustme.CA(), folder
        self.root = folder / f"root-{id(self)}.pem"
        self.gateway = folder / f"gateway-{id(self)}.pem"
        self._ca.cert_pem.write_to_path(self.root)
        gateway = self._ca.issue_cert("gateway.example")
        gateway.private_key_and_cert_chain_pem.write_to_path(self.gateway)

    def take_over(self):
        """Put a certificate of this CA, its key and the CA itself in place of what was there."""
        server = self._ca.issue_cert("127.0.0.1")
        for name, data in (
            ("server.pem", server.cert_chain_pems[0].bytes()),
            ("server.key", server.private_key_pem.bytes()),
            ("ca.pem", self._ca.cert_pem.bytes()),
        ):
            fresh = self._folder / "fresh"
            fresh.write_bytes(data)
            fresh.replace(self._folder / name)

    def gets_in(self, server, trusting):
        """Whether a client of this CA, who trusts that one, gets in: at both ports alike."""
        context = ssl.create_default_context(cafile=trusting.root)
        context.load_cert_chain(self.gateway)
        url = f"https://127.0.0.1:{server.server.http_port}/healthz"
        try:
            http = httpx.get(url, verify=context).status_code == 200
        except httpx.HTTPError:
            http = False
        with server.client(ca=trusting.root, certificate=self.gateway) as client:
            try:
                grpc = client.model_info().vocab_size > 0
            except Unavailable:
                grpc = False
        assert http == grpc
        return grpc


def test_new_files_hold_for_new_connections_and_broken_ones_change_nothing(
    tiny_config, tmp_path, caplog
):
    old, new = Authority(tmp_path), Authority(tmp_path)
    old.take_over()
    server = start(tiny_config, tmp_path, client_ca=True)
    try:
        with server.client(ca=old.root, certificate=old.gateway) as before:
            assert before.generate([5, 6, 7], max_tokens=2).outputs
            assert not new.gets_in(server, trusting=old)
            new.take_over()
            assert new.gets_in(server, trusting=new)
            assert not old.gets_in(server, trusting=new)  # its CA is not there any more
            assert not new.gets_in(server, trusting=old)
            assert before.generate([5, 6, 7], max_tokens=2).outputs  # its connection stays
        with caplog.at_level("ERROR", "prefixcache.service"):
            (tmp_path / "server.key").write_text("no key")
            assert new.gets_in(server, trusting=new)
            assert new.gets_in(server, trusting=new)
        assert [record.getMessage() for record in caplog.records] == ["tls_files"]
        old.take_over()
        assert old.gets_in(server, trusting=old)
    finally:
        server.close()


def test_files_that_cannot_be_used_are_named(pki, tmp_path):
    good, key = pki / "server.pem", pki / "server.key"
    for files in (
        TlsFiles(tmp_path / "none.pem", key),
        TlsFiles(good, pki / "gateway.pem"),
        TlsFiles(key, key),
    ):
        with pytest.raises(ConfigurationError, match="--tls-cert"):
            files.context()
    with pytest.raises(ConfigurationError, match="--tls-client-ca"):
        TlsFiles(good, key, tmp_path / "none.pem").context()
    TlsFiles(good, key, pki / "ca.pem").context()
    with pytest.raises(InvalidArgument, match="No such file"):
        RunningServer.client(_Nowhere(), ca=tmp_path / "none.pem")


def assert_raises(kind, call):
    with pytest.raises(kind):
        call()


class _Nowhere:
    target = "127.0.0.1:1"


def test_tls_is_off_unless_asked_for():
    assert ServerConfig().tls is None
