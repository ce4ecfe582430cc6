"""Certificate authorities and what they sign, made anew for each run."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID

Credentials = tuple[bytes, bytes, bytes]

DAY = datetime.timedelta(days=1)
LOCALHOST: tuple[x509.GeneralName, ...] = (
    x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
    x509.IPAddress(ipaddress.ip_address("::1")),
    x509.DNSName("localhost"),
)


class Authority:
    """Signs certificates, as the script in Ray's documentation of TLS does."""

    def __init__(self, name: str = "authority") -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = named(name)
        builder = valid(x509.CertificateBuilder().subject_name(self.name).issuer_name(self.name), DAY)
        builder = builder.public_key(self.key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self.pem = builder.sign(self.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def credentials(
        self,
        names: Sequence[x509.GeneralName] = LOCALHOST,
        *,
        lifetime: datetime.timedelta = DAY,
        trusts: bytes | None = None,
    ) -> Credentials:
        """(certificate, key, authorities). With a negative lifetime it has expired."""
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        builder = valid(x509.CertificateBuilder().subject_name(named("node")).issuer_name(self.name), lifetime)
        builder = builder.public_key(key.public_key())
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        certificate = builder.sign(self.key, hashes.SHA256())
        return certificate.public_bytes(serialization.Encoding.PEM), pem_of(key), trusts or self.pem


def self_signed(names: Sequence[x509.GeneralName]) -> Credentials:
    """One certificate for everything, in the form that `ray._common.tls_utils` makes."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    name = named("ray-internal")
    builder = valid(x509.CertificateBuilder().subject_name(name).issuer_name(name), DAY).public_key(key.public_key())
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    pem = builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    return pem, pem_of(key), pem


def named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def valid(builder: x509.CertificateBuilder, lifetime: datetime.timedelta) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.timezone.utc)
    begin = now - 2 * DAY
    return builder.serial_number(x509.random_serial_number()).not_valid_before(begin).not_valid_after(now + lifetime)


def pem_of(key: rsa.RSAPrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
