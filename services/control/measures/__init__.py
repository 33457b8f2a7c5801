"""What steps, copies and answers teach: rates, the online profile, predictions."""
