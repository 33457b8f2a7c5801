"""What requests begin with that others had: columns and anchors on the host, trunks in the pool."""
