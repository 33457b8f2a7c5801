"""What bodies say in vain, in all APIs: left out and named, replaced, or refused."""
