"""Throw-away certificate authorities, and certificates of them for the loopback address."""

from pathlib import Path

import trustme

from services.kit.transport import Certificates


class Authority:
    """One CA; its files lie in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._ca = trustme.CA()
        self.ca_file = str(folder / "ca.pem")
        self._ca.cert_pem.write_to_path(self.ca_file)

    def issue(self, name: str, *services: str) -> Certificates:
        """Return a new certificate for "127.0.0.1", "localhost" and these services, and trust in
        this CA.
        """
        issued = self._ca.issue_cert("127.0.0.1", "localhost", *services)
        files = self.files(name)
        Path(files.key_file).write_bytes(issued.private_key_pem.bytes())
        chain = b"".join(part.bytes() for part in issued.cert_chain_pems)
        Path(files.cert_file).write_bytes(chain)
        return files

    def files(self, name: str) -> Certificates:
        """Return where the certificate of that name is."""
        cert_file, key_file = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        return Certificates(cert_file=str(cert_file), key_file=str(key_file), ca_file=self.ca_file)
