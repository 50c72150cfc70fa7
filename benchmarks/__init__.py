"""What measures OptPipe: `python -m benchmarks NAME`. README.md lists the names. Nothing imports it, and it is not
installed."""
