"""A schedule that was made for another problem becomes one of this problem (OptPipe, section 4.2)."""
