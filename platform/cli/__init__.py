"""The command line `outrider`: serve, chat, admin, bench and train-draft."""
