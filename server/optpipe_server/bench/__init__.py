"""The service under load and after losses, measured from outside: real processes, sockets, databases."""
