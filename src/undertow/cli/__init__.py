"""The command line: main dispatches to one module a command. It holds no logic of its own."""
