"""The engine process: its messages, its main loop, and the supervisor that starts it again."""
