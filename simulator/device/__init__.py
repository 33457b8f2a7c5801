"""What is simulated of a machine: how long steps compute, and copies take."""
