"""What papers and others published, beside what is predicted and what the solver reaches."""
