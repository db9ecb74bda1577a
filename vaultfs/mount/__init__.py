"""The mount: kernel requests translated into calls of the core, and all that exists only while mounted."""
