{{/* Of [root, addresses of executors, seconds for an executor to come back]. */}}
{{- define "evenflow.gatewayContainer" -}}
{{- $root := index . 0 }}
{{- $gateway := $root.Values.gateway }}
{{- $scheme := empty $gateway.tlsSecretName | ternary "HTTP" "HTTPS" -}}
- name: gateway
  image: {{ include "evenflow.image" (list $root "gateway") }}
  imagePullPolicy: {{ $root.Values.image.pullPolicy }}
  command: [python, -m, services.gateway]
  {{- include "evenflow.containerSecurity" $root | nindent 2 }}
  env:
    - name: EVENFLOW_GATEWAY_ID
      valueFrom: {fieldRef: {fieldPath: metadata.name}}
    {{- include "evenflow.commonEnv" (list $root "gateway" "") | nindent 4 }}
    - {name: EVENFLOW_GATEWAY_EXECUTORS, value: {{ index . 1 | quote }}}
    - {name: EVENFLOW_GATEWAY_TRACKER, value: {{ $root.Values.tracker.enabled | ternary (printf "%s-tracker:50053" (include "evenflow.name" $root)) "" | quote }}}
    - {name: EVENFLOW_GATEWAY_LAME_DUCK_S, value: {{ $gateway.lameDuckSeconds | quote }}}
    - {name: EVENFLOW_GATEWAY_DRAIN_TIMEOUT_S, value: {{ $gateway.drainSeconds | quote }}}
    {{- if and (index . 2) (not (hasKey $gateway.settings "FAILOVER_TIMEOUT_S")) }}
    - {name: EVENFLOW_GATEWAY_FAILOVER_TIMEOUT_S, value: {{ index . 2 | quote }}}
    {{- end }}
    {{- if $gateway.open }}
    - {name: EVENFLOW_GATEWAY_OPEN, value: "true"}
    {{- else if $gateway.apiKeys.redis }}
    {{- include "evenflow.redisEnv" (list $root "EVENFLOW_GATEWAY_API_KEYS_REDIS_URL") | nindent 4 }}
    {{- else }}
    - {name: EVENFLOW_GATEWAY_API_KEYS_FILE, value: /keys/{{ $gateway.apiKeys.key }}}
    {{- end }}
    {{- if $gateway.tlsSecretName }}
    - {name: EVENFLOW_GATEWAY_EDGE_CERT_FILE, value: /edge-tls/tls.crt}
    - {name: EVENFLOW_GATEWAY_EDGE_KEY_FILE, value: /edge-tls/tls.key}
    {{- end }}
    {{- with include "evenflow.settings" (list "gateway" $gateway.settings) }}{{ . | trim | nindent 4 }}{{- end }}
  ports:
    - {name: http, containerPort: 8000}
    - {name: grpc, containerPort: 50050}
    - {name: metrics, containerPort: 9050}
  # Alive is a process that answers; ready, one that has an executor and does not leave.
  startupProbe:
    httpGet: {path: /health, port: http, scheme: {{ $scheme }}}
    periodSeconds: 2
    failureThreshold: 60
  livenessProbe:
    httpGet: {path: /health, port: http, scheme: {{ $scheme }}}
    timeoutSeconds: 5
    periodSeconds: 10
    failureThreshold: 6
  readinessProbe:
    httpGet: {path: /ready, port: http, scheme: {{ $scheme }}}
    timeoutSeconds: 5
    periodSeconds: 2
    failureThreshold: 2
  resources: {{ toJson $gateway.resources }}
  volumeMounts:
    {{- include "evenflow.mounts" (list $root "gateway") | nindent 4 }}
    {{- if not (or $gateway.open $gateway.apiKeys.redis) }}
    - {name: keys, mountPath: /keys, readOnly: true}
    {{- end }}
    {{- if $gateway.tlsSecretName }}
    - {name: edge-tls, mountPath: /edge-tls, readOnly: true}
    {{- end }}
{{- end }}

{{- define "evenflow.gatewayVolumes" -}}
{{- $gateway := .Values.gateway }}
{{- include "evenflow.certificateVolume" (list . "gateway") }}
{{- if not (or $gateway.open $gateway.apiKeys.redis) }}
- name: keys
  secret:
    secretName: {{ $gateway.apiKeys.secretName }}
    defaultMode: 0440
{{- end }}
{{- with $gateway.tlsSecretName }}
- name: edge-tls
  secret:
    secretName: {{ . }}
    defaultMode: 0440
{{- end }}
{{- end }}

{{/* Of [root, variable]: the URL of Redis. */}}
{{- define "evenflow.redisEnv" -}}
{{- $root := index . 0 }}
{{- $redis := $root.Values.redis }}
{{- $host := printf "%s-redis:6379/0" (include "evenflow.name" $root) }}
{{- if $redis.urlSecret.name -}}
- name: {{ index . 1 }}
  valueFrom: {secretKeyRef: {name: {{ $redis.urlSecret.name }}, key: {{ $redis.urlSecret.key }}}}
{{- else if $redis.passwordSecret.name -}}
- name: REDIS_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ $redis.passwordSecret.name }}, key: {{ $redis.passwordSecret.key }}}}
- {name: {{ index . 1 }}, value: "redis://:$(REDIS_PASSWORD)@{{ $host }}"}
{{- else -}}
- {name: {{ index . 1 }}, value: "redis://{{ $host }}"}
{{- end }}
{{- end }}
