"""The local demonstration: a small trained model, the local stack, a paced answer in a terminal."""
