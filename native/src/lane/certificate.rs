//! The DNS names of an X.509 certificate as they stand there. rustls' own view leaves out names that cannot be
//! names of the DNS, and an IP address is one.

const SEQUENCE: u8 = 0x30;
const OBJECT_IDENTIFIER: u8 = 0x06;
const OCTET_STRING: u8 = 0x04;
/// `[3]` of a `TBSCertificate`.
const EXTENSIONS: u8 = 0xa3;
/// `[2]` of a `GeneralName`.
const DNS_NAME: u8 = 0x82;
/// 2.5.29.17
const SUBJECT_ALT_NAME: &[u8] = &[0x55, 0x1d, 0x11];

/// Empty where the certificate has none or is malformed.
pub fn dns_names(certificate: &[u8]) -> Vec<&str> {
    let names = inner(certificate, SEQUENCE)
        .and_then(|certificate| inner(certificate, SEQUENCE))
        .and_then(|body| Elements(body).find(|(tag, _)| *tag == EXTENSIONS))
        .and_then(|(_, extensions)| inner(extensions, SEQUENCE))
        .and_then(|extensions| Elements(extensions).find_map(|(_, extension)| alternative_names(extension)));
    let names = Elements(names.unwrap_or_default()).filter(|(tag, _)| *tag == DNS_NAME);
    names.filter_map(|(_, name)| std::str::from_utf8(name).ok()).collect()
}

fn alternative_names(extension: &[u8]) -> Option<&[u8]> {
    let mut parts = Elements(extension);
    if parts.next()? != (OBJECT_IDENTIFIER, SUBJECT_ALT_NAME) {
        return None;
    }
    let (_, value) = parts.find(|(tag, _)| *tag == OCTET_STRING)?;
    inner(value, SEQUENCE)
}

/// The content of the element that `bytes` start with.
fn inner(bytes: &[u8], expected: u8) -> Option<&[u8]> {
    Elements(bytes).next().filter(|(tag, _)| *tag == expected).map(|(_, content)| content)
}

/// Tag and content of one DER element after the other. Ends where the bytes do, or stop to be DER.
struct Elements<'a>(&'a [u8]);

impl<'a> Iterator for Elements<'a> {
    type Item = (u8, &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let [tag, first, rest @ ..] = self.0 else { return None };
        let (length, rest) = match usize::from(*first) {
            short @ 0..=0x7f => (short, rest),
            // Certificates are smaller than the 4 GiB that four bytes can say.
            long @ 0x81..=0x84 => {
                let (length, rest) = rest.split_at_checked(long - 0x80)?;
                (length.iter().fold(0, |length, byte| length << 8 | usize::from(*byte)), rest)
            }
            _ => return None,
        };
        let (content, rest) = rest.split_at_checked(length)?;
        self.0 = rest;
        Some((*tag, content))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn element(tag: u8, content: &[u8]) -> Vec<u8> {
        [&[tag, 0x82, (content.len() >> 8) as u8, content.len() as u8][..], content].concat()
    }

    fn certificate(names: &[u8]) -> Vec<u8> {
        let oid = element(OBJECT_IDENTIFIER, SUBJECT_ALT_NAME);
        let value = element(OCTET_STRING, &element(SEQUENCE, names));
        let other = element(SEQUENCE, &element(OBJECT_IDENTIFIER, &[0x55, 0x1d, 0x0f]));
        let extensions = element(SEQUENCE, &[other, element(SEQUENCE, &[oid, value].concat())].concat());
        let body = [element(0x02, &[1]), element(EXTENSIONS, &extensions)].concat();
        element(SEQUENCE, &element(SEQUENCE, &body))
    }

    #[test]
    fn names_are_found_whatever_stands_around_them() {
        let names = [element(DNS_NAME, b"10.0.0.1"), element(0x87, &[10, 0, 0, 2]), element(DNS_NAME, b"localhost")];
        assert_eq!(dns_names(&certificate(&names.concat())), ["10.0.0.1", "localhost"]);
        assert!(dns_names(&certificate(&[])).is_empty());
    }

    proptest! {
        #[test]
        fn any_bytes_have_names_or_none(bytes: Vec<u8>) {
            let _ = dns_names(&bytes);
            let _ = dns_names(&certificate(&bytes));
        }
    }
}
