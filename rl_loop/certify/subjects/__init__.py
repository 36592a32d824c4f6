"""What can be certified without further code: each module makes one kind of subject."""
