//! Lanes: what bytes travel on between two processes.

pub mod certificate;
pub mod exchange;
pub mod fds;
mod gate;
pub mod placement;
pub mod segment;
pub mod shortage;
mod socket;
mod stream;
pub mod sys;
pub mod tls;
mod unix;

pub use gate::Gate;
pub use socket::{Corked, Flushes, Socket};
pub use unix::{UnixPath, bind as bind_unix};

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::str::FromStr;
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lane {
    Tcp,
    Unix,
}

impl Lane {
    pub fn name(self) -> &'static str {
        match self {
            Lane::Tcp => "tcp",
            Lane::Unix => "unix",
        }
    }
}

/// Where a peer listens: `tcp:host:port` (an IPv6 host in brackets) or `unix:/path`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Endpoint {
    Tcp(String),
    Unix(PathBuf),
}

impl FromStr for Endpoint {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            Some(("unix", path)) if path.starts_with('/') => Ok(Endpoint::Unix(PathBuf::from(path))),
            Some(("tcp", address)) if address.contains(':') => Ok(Endpoint::Tcp(address.to_owned())),
            _ => Err(format!("endpoint {text:?} is neither \"tcp:host:port\" nor \"unix:/path\"")),
        }
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Endpoint::Tcp(address) => write!(f, "tcp:{address}"),
            Endpoint::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

impl Endpoint {
    /// `tls` holds for TCP; a Unix-domain socket does not leave the node, and its peer is of this user.
    pub async fn connect(&self, tls: Option<&tls::Connector>) -> io::Result<Socket> {
        match self {
            Endpoint::Tcp(address) => {
                let stream = TcpStream::connect(address.as_str()).await?;
                stream.set_nodelay(true)?;
                Ok(match tls {
                    None => Socket::tcp(stream),
                    Some(tls) => Socket::tls(tls.connect(address, stream).await?),
                })
            }
            Endpoint::Unix(path) => Socket::unix(UnixStream::connect(path).await?),
        }
    }
}

/// Where connections of one lane arrive.
#[derive(Debug)]
pub enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener),
}

impl Listener {
    pub async fn accept(&self) -> io::Result<Accepted> {
        Ok(match self {
            Listener::Tcp(listener) => Accepted::Tcp(listener.accept().await?.0),
            Listener::Unix(listener) => Accepted::Unix(listener.accept().await?.0),
        })
    }
}

/// A connection as it was accepted: nothing is known of its peer yet.
#[derive(Debug)]
pub enum Accepted {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Accepted {
    pub fn lane(&self) -> Lane {
        match self {
            Accepted::Tcp(_) => Lane::Tcp,
            Accepted::Unix(_) => Lane::Unix,
        }
    }

    /// For logs.
    pub fn peer(&self) -> String {
        match self {
            Accepted::Tcp(stream) => stream.peer_addr().map_or("tcp".into(), |address| format!("tcp:{address}")),
            Accepted::Unix(stream) => match stream.peer_cred().ok().and_then(|credentials| credentials.pid()) {
                Some(pid) => format!("unix:pid {pid}"),
                None => "unix".into(),
            },
        }
    }

    /// The socket behind the lane's own checks: TLS where it is on, the peer's user.
    pub async fn secured(self, tls: Option<&tls::Acceptor>) -> io::Result<Socket> {
        match self {
            Accepted::Tcp(stream) => {
                stream.set_nodelay(true)?;
                Ok(match tls {
                    None => Socket::tcp(stream),
                    Some(tls) => Socket::tls(tls.accept(stream).await?),
                })
            }
            Accepted::Unix(stream) => Socket::unix(stream),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_read_as_they_print() {
        for text in ["tcp:127.0.0.1:80", "tcp:[::1]:80", "unix:/run/a.sock"] {
            assert_eq!(text.parse::<Endpoint>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn an_unknown_endpoint_is_named_in_the_error() {
        for text in ["http://x", "unix:relative", "tcp:nohost", ""] {
            assert!(text.parse::<Endpoint>().unwrap_err().contains(&format!("{text:?}")));
        }
    }
}
