"""The live requests of this gateway: admitted, routed, paced, delivered."""
