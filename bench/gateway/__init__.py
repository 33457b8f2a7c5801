"""What the gateway and the tracker cost, and how precisely tokens are released."""
