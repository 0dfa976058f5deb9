"""The command line: `undertow train | eval | generate | demo`. It holds no logic of its own."""
