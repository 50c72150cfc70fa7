"""How a schedule is judged: who waits for whom, times, memory, validity, length."""
