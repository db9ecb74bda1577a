"""How the command line talks to running mounts: the protocol, its two ends, and the register of what is mounted."""
