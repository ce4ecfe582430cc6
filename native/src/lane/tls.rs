//! TLS of the TCP lane, as Ray sets it up for grpc: both sides show a certificate of one authority, and the
//! caller also checks that the certificate names the address it called.

use super::certificate;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{Resumption, verify_server_cert_signed_by_trust_anchor, verify_server_name};
use rustls::crypto::{CryptoProvider, ring, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::{NoServerSessionStorage, ParsedCertificate, WebPkiClientVerifier};
use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, RootCertStore, ServerConfig, SignatureScheme};
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use thiserror::Error;
use tokio::net::TcpStream;
use tokio_rustls::{TlsAcceptor, TlsConnector, TlsStream};

const HTTP2: &[u8] = b"h2";

/// Every peer of ours, and every grpc that Ray 2.54 and later run with, speaks it.
const VERSIONS: &[&rustls::SupportedProtocolVersion] = &[&rustls::version::TLS13];

/// Why credentials cannot be used. Never shows what is in them.
#[derive(Debug, Error)]
pub enum CredentialsError {
    #[error("no certificate in the {0}")]
    NoCertificate(&'static str),
    #[error("the {0} is not PEM: {1}")]
    NotPem(&'static str, String),
    #[error("the private key and the certificate: {0}")]
    Unusable(String),
}

/// A certificate chain, its key and the authorities to trust, in PEM.
pub struct Pem<'a> {
    pub certificate: &'a [u8],
    pub key: &'a [u8],
    pub authorities: &'a [u8],
}

/// What a caller needs.
#[derive(Clone)]
pub struct Connector(Arc<ClientConfig>);

/// What a server needs.
#[derive(Clone)]
pub struct Acceptor(Arc<ServerConfig>);

impl Connector {
    pub fn new(pem: &Pem<'_>) -> Result<Self, CredentialsError> {
        let (chain, key) = (pem.chain()?, pem.key()?);
        let provider = Arc::new(ring::default_provider());
        let verifier = AsGrpcDoes { roots: pem.roots()?, provider: Arc::clone(&provider) };
        let mut config = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(VERSIONS)
            .and_then(|builder| {
                let builder = builder.dangerous().with_custom_certificate_verifier(Arc::new(verifier));
                builder.with_client_auth_cert(chain, key)
            })
            .map_err(unusable)?;
        config.alpn_protocols = vec![HTTP2.to_vec()];
        // Each connection shows its certificates, and no lock of a session cache is held over a fork.
        config.resumption = Resumption::disabled();
        Ok(Connector(Arc::new(config)))
    }

    /// `address`: host and port, as it was connected to.
    pub async fn connect(&self, address: &str, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        let host = host_of(address);
        let name = ServerName::try_from(host.to_owned())
            .map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, format!("TLS: {host:?} is not a host")))?;
        let connector = TlsConnector::from(Arc::clone(&self.0));
        let connected = connector.connect(name, stream).await;
        connected.map(TlsStream::Client).map_err(|error| io::Error::new(error.kind(), format!("TLS: {error}")))
    }
}

impl Acceptor {
    /// Without authorities any caller may connect.
    pub fn new(pem: &Pem<'_>) -> Result<Self, CredentialsError> {
        let (chain, key) = (pem.chain()?, pem.key()?);
        let provider = Arc::new(ring::default_provider());
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(VERSIONS)
            .map_err(unusable)?;
        let builder = if pem.authorities.is_empty() {
            builder.with_no_client_auth()
        } else {
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(pem.roots()?), provider);
            builder.with_client_cert_verifier(verifier.build().map_err(unusable)?)
        };
        let mut config = builder.with_single_cert(chain, key).map_err(unusable)?;
        config.alpn_protocols = vec![HTTP2.to_vec()];
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(Acceptor(Arc::new(config)))
    }

    pub async fn accept(&self, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        TlsAcceptor::from(Arc::clone(&self.0)).accept(stream).await.map(TlsStream::Server)
    }
}

impl Pem<'_> {
    fn chain(&self) -> Result<Vec<CertificateDer<'static>>, CredentialsError> {
        certificates(self.certificate, "certificate chain")
    }

    fn roots(&self) -> Result<RootCertStore, CredentialsError> {
        let mut roots = RootCertStore::empty();
        for authority in certificates(self.authorities, "certificate authorities")? {
            roots.add(authority).map_err(unusable)?;
        }
        Ok(roots)
    }

    fn key(&self) -> Result<PrivateKeyDer<'static>, CredentialsError> {
        PrivateKeyDer::from_pem_slice(self.key)
            .map_err(|error| CredentialsError::NotPem("private key", error.to_string()))
    }
}

/// Whether a connection ended because one side did not accept the other's TLS: trying again will not help.
/// rustls' errors travel through h2 as text, but they alone are of this kind.
pub fn is_refusal(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::InvalidData
}

fn certificates(pem: &[u8], what: &'static str) -> Result<Vec<CertificateDer<'static>>, CredentialsError> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    let found = found.map_err(|error| CredentialsError::NotPem(what, error.to_string()))?;
    if found.is_empty() { Err(CredentialsError::NoCertificate(what)) } else { Ok(found) }
}

#[allow(clippy::needless_pass_by_value)] // as `map_err` hands it over
fn unusable(error: impl ToString) -> CredentialsError {
    CredentialsError::Unusable(error.to_string())
}

fn host_of(address: &str) -> &str {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host)
}

/// Verifies a server as grpc does. It differs from web browsers in one point: an IP address may also stand
/// among the DNS names of a certificate, which is where Ray's own `generate_self_signed_tls_certs` puts it.
#[derive(Debug)]
struct AsGrpcDoes {
    roots: RootCertStore,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for AsGrpcDoes {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let parsed = ParsedCertificate::try_from(end_entity)?;
        let algorithms = self.provider.signature_verification_algorithms.all;
        verify_server_cert_signed_by_trust_anchor(&parsed, &self.roots, intermediates, now, algorithms)?;
        match verify_server_name(&parsed, server_name) {
            Err(rustls::Error::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            )) if is_among_dns_names(end_entity, server_name) => {}
            verified => verified?,
        }
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(rustls::Error::General("TLS 1.2 is not offered".into()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signed, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

fn is_among_dns_names(certificate: &[u8], server_name: &ServerName<'_>) -> bool {
    let ServerName::IpAddress(address) = server_name else { return false };
    let address = IpAddr::from(*address);
    certificate::dns_names(certificate).iter().any(|name| name.parse() == Ok(address))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_of_an_address_has_no_port_and_no_brackets() {
        for (address, host) in
            [("10.0.0.1:80", "10.0.0.1"), ("[fd00::1]:80", "fd00::1"), ("node.local:1", "node.local")]
        {
            assert_eq!(host_of(address), host);
        }
    }

    #[test]
    fn unusable_credentials_are_refused_without_showing_them() {
        let pem = |certificate, key| Pem { certificate, key, authorities: b"" };
        let error = Acceptor::new(&pem(b"", b"")).err().unwrap().to_string();
        assert_eq!(error, "no certificate in the certificate chain");
        let certificate = b"-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n";
        let error = Acceptor::new(&pem(certificate, b"hidden")).err().unwrap().to_string();
        assert!(error.contains("private key") && !error.contains("hidden"), "{error}");
    }
}
