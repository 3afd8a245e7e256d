"""`ebbtide doctor`: measures this machine, says what ebbtide can do on it and what slows it."""
