"""The API: routes, strict bodies, problem documents, views, server-sent events, keys, scopes and limits."""
