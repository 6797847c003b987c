"""What tests share: servers, clients, checkers, oracles and random inputs."""
